"""facebookresearch/mae: `engine_pretrain.train_one_epoch` with its model, its loss scaler and its schedule.

`random_masking` sorts random numbers; those that it draws here have the order into which networks/src/mask.rs shuffles the cells."""

import contextlib
import importlib
import io
import math
import sys
import types
from functools import partial

import numpy as np
import timm.optim
import torch
import torch.nn as nn

from dinov2_training import Stream
from machine import machine, module, named, rename
from numbers_by_name import N_BATCHES, fill, use_our_positions, views

BATCH, PER_EPOCH, EPOCHS, SIZE, PATCH, RATIO = 16, 4, 3, 32, 4, 0.75

NAMES = rename((r"^mask_token", "decoder.embed.mask_token"), (r"^decoder_pos_embed", "decoder.embed.pos_embed"),
               (r"^decoder_embed\.", "decoder.embed."), (r"^decoder_blocks\.", "decoder.blocks."),
               (r"^decoder_norm\.", "decoder.norm."), (r"^decoder_pred\.", "decoder.predict."))


def import_mae(paths):
    """The code is of an older timm, PyTorch and numpy."""
    module("torch._six", inf=math.inf)
    if str(paths.mae) not in sys.path:
        sys.path.insert(0, str(paths.mae))
    np.float = float
    models, engine, misc = [importlib.import_module(name) for name in ("models_mae", "engine_pretrain", "util.misc")]
    models.Block = lambda *args, qk_scale=None, **options: timm.models.vision_transformer.Block(*args, **options)
    return models, engine, misc


def order(step: int, position: int, n_cells: int) -> list[int]:
    """The cells of a view as networks/src/mask.rs shuffles them: the first ones are visible."""
    cells = list(range(n_cells))
    Stream(0, 0x6D61736B00000000 ^ step, position, 0).shuffle(cells)
    return cells


def noise(step: int, n_images: int, n_cells: int) -> torch.Tensor:
    """Numbers `[B, N]` that are sorted when the cells of each view are shuffled."""
    return torch.stack([torch.tensor(order(step, position, n_cells)).argsort() for position in range(n_images)]).double()


def channels_last(rows: torch.Tensor) -> torch.Tensor:
    """Rows of pixels that are in the order (channel, row, column), in that of MAE: (row, column, channel)."""
    return rows.unflatten(0, (3, PATCH, PATCH)).movedim(0, 2).flatten(0, 2)


def channels_first(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of `channels_last`."""
    return rows.unflatten(0, (PATCH, PATCH, 3)).movedim(2, 0).flatten(0, 2)


def mae(paths, run: str):
    models, engine, misc = import_mae(paths)
    losses, drawn = [], iter(range(EPOCHS * PER_EPOCH))
    rand = lambda n_images, n_cells, **_: noise(next(drawn), n_images, n_cells)
    with machine([(torch, "rand", rand)]):
        model = models.MaskedAutoencoderViT(
            img_size=SIZE, patch_size=PATCH, embed_dim=24, depth=2, num_heads=2, decoder_embed_dim=16, decoder_depth=2,
            decoder_num_heads=2, mlp_ratio=4, norm_layer=partial(nn.LayerNorm, eps=1e-6), norm_pix_loss=True)
        fill(model, lambda name: None if name.endswith("pos_embed") else NAMES(name))
        use_our_positions(model.pos_embed, 1)
        use_our_positions(model.decoder_pos_embed, 1)
        for parameter in model.decoder_pred.parameters():
            parameter.data.copy_(channels_last(parameter.data))
        # `add_weight_decay` of the older timm, as main_pretrain.py calls it.
        groups = timm.optim.param_groups_weight_decay(model, 0.05)
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
        args = types.SimpleNamespace(accum_iter=1, mask_ratio=RATIO, lr=0.01, min_lr=1e-5, warmup_epochs=1, epochs=EPOCHS)
        writer = types.SimpleNamespace(
            log_dir="", add_scalar=lambda name, value, _: losses.append(value) if name == "train_loss" else None)
        scaler = misc.NativeScalerWithGradNormCount()
        data = [(views(run, i, BATCH, [(1, SIZE)])[0], None) for i in range(N_BATCHES)]
        with contextlib.redirect_stdout(io.StringIO()):
            for epoch in range(EPOCHS):
                loader = [data[(epoch * PER_EPOCH + i) % N_BATCHES] for i in range(PER_EPOCH)]
                engine.train_one_epoch(model, loader, optimizer, torch.device("cpu"), epoch, scaler, writer, args)
    assert next(drawn, None) is None
    out = named("encoder", model.state_dict(), NAMES)
    for name in ("weight", "bias"):
        out[f"encoder.decoder.predict.{name}"] = channels_first(out[f"encoder.decoder.predict.{name}"])
    return out | {"loss": torch.tensor(losses)}
