"""facebookresearch/ijepa: all of `src.train.main` with its model, its masks and its schedules.

Masks are `MaskCollator`'s, drawn from the streams of networks/src/mask.rs, step by step and image by image. Contexts are not cut to the
shortest of the batch, so encoder and predictor see one image at a time. Schedules of rate and weight decay begin with the value of step 0:
the official ones are a step ahead of those here."""

import contextlib
import importlib
import io
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn

from dinov2_training import Stream
from machine import Loader, machine, module, named, rename
from numbers_by_name import N_BATCHES, fill, use_our_positions, views

BATCH, PER_EPOCH, EPOCHS, SIZE, PATCH = 16, 4, 3, 32, 4
TARGETS, CONTEXT, ASPECT, N_TARGETS, MIN_CONTEXT = (0.15, 0.2), (0.85, 1.0), (0.75, 1.5), 4, 15

NAMES = rename((r"^mask_token", "predictor.embed.mask_token"), (r"^predictor_pos_embed", "predictor.embed.pos_embed"),
               (r"^predictor_embed\.", "predictor.embed."), (r"^predictor_blocks\.", "predictor.blocks."),
               (r"^predictor_norm\.", "predictor.norm."), (r"^predictor_proj\.", "predictor.predict."))


def import_ijepa(paths):
    """The package is called `src`, as SwAV's is."""
    is_theirs = lambda name: name == "src" or name.startswith("src.")
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if is_theirs(name)}
    module("src", Path(paths.ijepa) / "src")
    names = ("train", "helper", "models.vision_transformer", "masks.multiblock", "utils.schedulers")
    try:
        # The code logs to the output that it finds.
        with contextlib.redirect_stdout(io.StringIO()):
            return [importlib.import_module(f"src.{name}") for name in names]
    finally:
        for name in [name for name in sys.modules if is_theirs(name)]:
            del sys.modules[name]
        sys.modules.update(before)


class Ragged(list):
    """Cells of each image, of different numbers."""

    def to(self, *_, **__):
        return self


@contextlib.contextmanager
def drawing_from(stream: Stream):
    """PyTorch's random numbers are those of `stream`."""
    before = torch.rand, torch.randint
    torch.rand = lambda *_, **__: torch.tensor([stream.between(0.0, 1.0)])
    torch.randint = lambda low, high, _: torch.tensor([low + stream.below(high - low)])
    try:
        yield
    finally:
        torch.rand, torch.randint = before


def masks(multiblock, step: int, n_images: int, side: int = SIZE // PATCH, min_context: int = MIN_CONTEXT):
    """Visible cells by image, and the cells of each target block, `[B, n]`: the official `__call__` without the cutting."""
    collator = multiblock.MaskCollator(
        input_size=side, patch_size=1, enc_mask_scale=CONTEXT, pred_mask_scale=TARGETS, aspect_ratio=ASPECT, nenc=1,
        npred=N_TARGETS, min_keep=min_context)
    domain = 0x6D61736B00000000 ^ step
    with drawing_from(Stream(0, domain, 2**64 - 1, 0)):
        target_size = collator._sample_block_size(None, collator.pred_mask_scale, collator.aspect_ratio)
        context_size = collator._sample_block_size(None, collator.enc_mask_scale, (1.0, 1.0))
    contexts, targets = Ragged(), []
    for position in range(n_images):
        with drawing_from(Stream(0, domain, position, 0)):
            # The official code seeks target blocks, too, until they are larger: forever, if their size is not.
            collator.min_keep = 0
            blocks = [collator._sample_block_mask(target_size) for _ in range(N_TARGETS)]
            collator.min_keep = min_context
            context, _ = collator._sample_block_mask(context_size, [free for _, free in blocks])
        contexts.append(context)
        targets.append([cells for cells, _ in blocks])
    return contexts, [torch.stack(cells) for cells in zip(*targets)]


def ijepa(paths, run: str):
    train, helper, vits, multiblock, schedulers = import_ijepa(paths)
    losses = []

    class Encoder(vits.VisionTransformer):
        def forward(self, x, masks=None):
            if masks is None:
                return super().forward(x)
            out = []
            for image, cells in zip(x, masks[0]):
                out.append(super().forward(image[None], [cells[None]]))
            return out

    class Predictor(vits.VisionTransformerPredictor):
        def forward(self, x, masks_x, masks):
            out = []
            for i, (tokens, cells) in enumerate(zip(x, masks_x[0])):
                out.append(super().forward(tokens, [cells[None]], [block[i:i + 1] for block in masks]))
            # By block, then by image, as the official code returns them.
            return torch.stack(out, 1).flatten(0, 1)

    class Rates(schedulers.WarmupCosineSchedule):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self._step = -1.0

    class Decays(schedulers.CosineWDSchedule):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self._step = -1.0

    def init_model(**options):
        encoder, predictor = helper.init_model(**options)
        for network in (encoder, predictor):
            fill(network, lambda name: None if name.endswith("pos_embed") else NAMES(name))
        use_our_positions(encoder.pos_embed, 0)
        use_our_positions(predictor.predictor_pos_embed, 0)
        return encoder, predictor

    class Log:
        def __init__(self, *_) -> None:
            pass

        def log(self, _epoch, _step, loss, *_) -> None:
            losses.append(loss)

    def batch(step: int):
        contexts, targets = masks(multiblock, step, BATCH)
        return [views(run, step % N_BATCHES, BATCH, [(1, SIZE)])[0]], [contexts], targets

    steps = [batch(step) for step in range(EPOCHS * PER_EPOCH)]
    loader = Loader([steps[i * PER_EPOCH:][:PER_EPOCH] for i in range(EPOCHS)])
    config = {
        "meta": {"use_bfloat16": False, "model_name": "vit_golden", "load_checkpoint": False, "read_checkpoint": None,
                 "copy_data": False, "pred_depth": 2, "pred_emb_dim": 16},
        "data": {"use_gaussian_blur": False, "use_horizontal_flip": False, "use_color_distortion": False,
                 "color_jitter_strength": 0.0, "batch_size": BATCH, "pin_mem": False, "num_workers": 0, "root_path": "",
                 "image_folder": "", "crop_size": SIZE, "crop_scale": (0.3, 1.0)},
        "mask": {"allow_overlap": False, "patch_size": PATCH, "num_enc_masks": 1, "min_keep": MIN_CONTEXT, "enc_mask_scale": CONTEXT,
                 "num_pred_masks": N_TARGETS, "pred_mask_scale": TARGETS, "aspect_ratio": ASPECT},
        "optimization": {"ema": (0.9, 1.0), "ipe_scale": 1.0, "weight_decay": 0.04, "final_weight_decay": 0.4, "epochs": EPOCHS,
                         "warmup": 1, "start_lr": 1e-3, "lr": 5e-3, "final_lr": 1e-5},
        "logging": {"write_tag": "golden"},
    }
    vits.vit_golden = lambda **options: Encoder(
        embed_dim=24, depth=2, num_heads=2, mlp_ratio=4, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6), **options)
    replaced = [
        (vits, "VisionTransformerPredictor", Predictor), (helper, "WarmupCosineSchedule", Rates),
        (helper, "CosineWDSchedule", Decays), (train, "init_model", init_model), (train, "init_distributed", lambda: (1, 0)),
        (train, "DistributedDataParallel", lambda network, **_: network), (train, "CSVLogger", Log),
        (train, "make_transforms", lambda **_: None), (train, "make_imagenet1k", lambda **_: (None, loader, loader.sampler)),
        (train.mp, "set_start_method", lambda *_: None),
    ]
    with tempfile.TemporaryDirectory() as folder, machine(replaced):
        config["logging"]["folder"] = folder
        train.main(config)
        saved = torch.load(f"{folder}/golden-latest.pth.tar", weights_only=False)
    out = named("target", saved["target_encoder"], NAMES)
    out |= named("context", saved["encoder"], NAMES) | named("context", saved["predictor"], NAMES)
    return out | {"loss": torch.tensor(losses)}
