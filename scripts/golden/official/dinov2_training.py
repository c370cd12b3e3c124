"""facebookresearch/dinov2: all of `train.do_train` with `SSLMetaArch`, on masks that trainer's mask.rs draws."""

import importlib
import math
import os
import sys
import types
from functools import partial

import torch
import torch.nn as nn

from machine import machine, module, rename
from numbers_by_name import N_BATCHES, chacha8, fill, views

BATCH, PER_EPOCH, EPOCHS, SIZE, PATCH, LOCAL = 16, 4, 4, 32, 8, 2

NAMES = rename((r"^(dino_)?head\.", "head."), (r"^dino_head\.", "head."), (r"^ibot_head\.", "patch_head."),
               (r"^backbone\.register_tokens", "reg_token"), (r"^backbone\.(.*)mlp\.w12\.", r"\1mlp.fc1."),
               (r"^backbone\.(.*)mlp\.w3\.", r"\1mlp.fc2."), (r"^backbone\.", ""))


class Stream:
    """augment::seed::ViewRng::from_words."""

    def __init__(self, *words: int) -> None:
        self.words, self.drawn, self.at = words, chacha8(list(words), 4096), 0

    def u32(self) -> int:
        self.at += 1
        return int(self.drawn[self.at - 1])

    def below(self, n: int) -> int:
        return self.u32() * n >> 32

    def between(self, low: float, high: float) -> float:
        unit = (self.u32() | self.u32() << 32) >> 11
        return low + (high - low) * unit / 2**53

    def shuffle(self, items: list) -> None:
        for i in range(len(items) - 1, 0, -1):
            other = self.below(i + 1)
            items[i], items[other] = items[other], items[i]


def masks(step: int, n_images: int, n_views: int, side: int, share: float, ratio: tuple[float, float], exact: bool = False) -> torch.Tensor:
    """networks::mask for `Spread::Even` or `Spread::Exact` and blocks of four or more, seed 0: `[B, V, N]`."""
    domain = 0x6D61736B00000000 ^ step
    n, n_masked, cells = n_images * n_views, int(n_images * n_views * share), side * side
    order = list(range(n))
    Stream(0, domain, 2**64 - 1, 0).shuffle(order)
    out = torch.zeros(n_images, n_views, cells, dtype=torch.bool)
    for number, place in enumerate(order[:n_masked]):
        rng = Stream(0, domain, place // n_views, place % n_views)
        edge = lambda i: ratio[0] + (ratio[1] - ratio[0]) * i / n_masked
        part = edge(number + 1) if exact else rng.between(edge(number), edge(number + 1))
        wanted, mask, count = int(cells * part), torch.zeros(side, side, dtype=torch.bool), 0
        while count < wanted:
            room, placed = float(min(wanted - count, side // 2 * side)), 0
            for _ in range(10):
                area = rng.between(4.0, room)
                aspect = math.exp(rng.between(-math.log(1 / 0.3), math.log(1 / 0.3)))
                h, w = math.floor(math.sqrt(area * aspect) + 0.5), math.floor(math.sqrt(area / aspect) + 0.5)
                if h == 0 or w == 0 or h >= side or w >= side:
                    continue
                top = rng.below(side - h + 1)
                left = rng.below(side - w + 1)
                free = h * w - int(mask[top:top + h, left:left + w].sum())
                if 0 < free <= room:
                    mask[top:top + h, left:left + w] = True
                    placed = free
                    break
            if placed == 0:
                break
            count += placed
        if exact:
            free = [cell for cell in range(cells) if not mask.flatten()[cell]]
            for i in range(min(wanted - count, len(free))):
                other = i + rng.below(len(free) - i)
                free[i], free[other] = free[other], free[i]
                mask[free[i] // side, free[i] % side] = True
        out[place // n_views, place % n_views] = mask.flatten()
    return out


def import_dinov2(paths):
    """The modules of the official code, without xFormers, FSDP, its loaders and its configuration files."""
    os.environ["XFORMERS_DISABLED"] = "1"

    class BlockDiagonalMask:
        @classmethod
        def from_tensor_list(cls, tensors):
            mask = cls()
            mask.lengths = [tensor.shape[1] for tensor in tensors]
            return mask, torch.cat(tensors, 1)

        def split(self, x):
            return list(x.split(self.lengths, 1))

    here = types.SimpleNamespace
    module("xformers")
    module("xformers.ops", fmha=here(BlockDiagonalMask=BlockDiagonalMask))
    if str(paths.dinov2) not in sys.path:
        sys.path.insert(0, str(paths.dinov2))
    for name in [name for name in sys.modules if name == "dinov2" or name.startswith("dinov2.")]:
        del sys.modules[name]
    every = lambda *_, **__: None
    checkpointer = lambda *_, **__: here(resume_or_load=lambda *_, **__: {}, step=every)
    module("fvcore.common.checkpoint", PeriodicCheckpointer=checkpointer)
    params = lambda of: [here(params=list(of.parameters()))]
    module("dinov2.fsdp", FSDPCheckpointer=checkpointer, ShardedGradScaler=None, get_fsdp_modules=params,
           get_fsdp_wrapper=None, reshard_fsdp_model=every)
    module("dinov2.data", SamplerType=here(SHARDED_INFINITE=None), make_data_loader=every, make_dataset=every,
           collate_data_and_cast=every, DataAugmentationDINO=every, MaskingGenerator=every)
    module("dinov2.utils.config", setup=None)

    class MetricLogger:
        def __init__(self, **_) -> None:
            self.meters = {}

        def log_every(self, data, *_):
            return iter(data)

        def update(self, **_) -> None:
            pass

        def synchronize_between_processes(self) -> None:
            pass

    module("dinov2.logging", MetricLogger=MetricLogger)
    names = ("train.train", "train.ssl_meta_arch", "models.vision_transformer", "layers.block", "layers")
    return [importlib.import_module(f"dinov2.{name}") for name in names]


def namespace(values: dict):
    class Both(types.SimpleNamespace):
        def __getitem__(self, key):
            return getattr(self, key)

    return Both(**{key: namespace(value) if isinstance(value, dict) else value for key, value in values.items()})


def config(separate: bool, centering: str, lr: float, options: dict):
    head = {"head_n_prototypes": 16, "head_bottleneck_dim": 8, "head_nlayers": 3, "head_hidden_dim": 12}
    student = {
        "arch": "vit_golden", "patch_size": PATCH, "layerscale": 0.5, "ffn_layer": "mlp", "block_chunks": 0, "qkv_bias": True,
        "proj_bias": True, "ffn_bias": True, "num_register_tokens": 0, "interpolate_offset": 0.1, "interpolate_antialias": False,
        "drop_path_rate": 0.0, "drop_path_uniform": True, "pretrained_weights": "",
    }
    return namespace({
        "student": student | options,
        "crops": {"global_crops_size": SIZE, "local_crops_size": 16, "local_crops_number": LOCAL, "global_crops_scale": None,
                  "local_crops_scale": None},
        "dino": head | {"loss_weight": 1.0, "koleo_loss_weight": 0.1},
        "ibot": {"head_n_prototypes": 20, "head_bottleneck_dim": 6, "head_nlayers": 3, "head_hidden_dim": 10, "loss_weight": 1.0,
                 "separate_head": separate, "mask_ratio_min_max": (0.1, 0.5), "mask_sample_probability": 0.5},
        "teacher": {"momentum_teacher": 0.9, "final_momentum_teacher": 1.0, "warmup_teacher_temp": 0.04, "teacher_temp": 0.07,
                    "warmup_teacher_temp_epochs": 2},
        "train": {"OFFICIAL_EPOCH_LENGTH": PER_EPOCH, "centering": centering, "output_dir": "", "dataset_path": "",
                  "batch_size_per_gpu": BATCH, "num_workers": 0},
        "optim": {"adamw_beta1": 0.9, "adamw_beta2": 0.999, "lr": lr, "min_lr": 1e-5, "epochs": EPOCHS, "warmup_epochs": 1,
                  "weight_decay": 0.04, "weight_decay_end": 0.4, "clip_grad": 0.3, "layerwise_decay": 0.9,
                  "patch_embed_lr_mult": 0.2, "freeze_last_layer_epochs": 1},
        "compute_precision": {"grad_scaler": False},
        "MODEL": {"WEIGHTS": ""}, "evaluation": {"eval_period_iterations": 0},
    })


def batch(run: str, step: int) -> dict:
    """What the official collate function makes of a batch."""
    crops = views(run, step % N_BATCHES, BATCH, [(2, SIZE), (LOCAL, 16)])
    chosen = masks(step, BATCH, 2, SIZE // PATCH, 0.5, (0.1, 0.5)).transpose(0, 1).flatten(0, 1)
    places = chosen.flatten().nonzero().flatten()
    weight = (1 / chosen.sum(-1).clamp(min=1.0)).unsqueeze(-1).expand_as(chosen)[chosen]
    return {
        "collated_global_crops": torch.cat(crops[:2]), "collated_local_crops": torch.cat(crops[2:]), "collated_masks": chosen,
        "mask_indices_list": places, "masks_weight": weight.double(), "upperbound": len(places) + 3,
        "n_masked_patches": torch.tensor([len(places)]),
    }


def dinov2(paths, run: str, separate: bool, centering: str, lr: float, options: dict):
    train, arch, vits, blocks, layers = import_dinov2(paths)
    losses = []

    def vit(patch_size, **kwargs):
        return vits.DinoVisionTransformer(patch_size=patch_size, embed_dim=24, depth=2, num_heads=2, mlp_ratio=2,
                                          block_fn=partial(layers.NestedTensorBlock, attn_class=layers.MemEffAttention), **kwargs)

    one = blocks.Block.forward
    each = lambda block, x: [one(block, part) for part in x] if isinstance(x, list) else one(block, x)

    def backprop(model, loss):
        losses.append(loss.detach().clone())
        loss.backward()

    replaced = [
        (blocks.NestedTensorBlock, "forward", each), (arch.SSLMetaArch, "backprop_loss", backprop),
        (arch.SSLMetaArch, "fsdp_synchronize_streams", lambda _: None),
        (train, "make_data_loader", lambda **_: [batch(run, step) for step in range(EPOCHS * PER_EPOCH)]),
    ]
    vits.vit_golden = vit
    nn.Module.clip_grad_norm_ = lambda part, largest: nn.utils.clip_grad_norm_(part.parameters(), largest)
    with machine(replaced):
        model = arch.SSLMetaArch(config(separate, centering, lr, options))
        fill(model.student, NAMES)
        model.teacher.load_state_dict(model.student.state_dict())
        train.do_train(model.cfg, model)
    rates = train.build_schedulers(model.cfg)[0].schedule[: len(losses)]
    out = {"loss": torch.stack(losses), "lr": torch.tensor(rates)}
    for name, network in (("student", model.student), ("teacher", model.teacher)):
        out |= {f"{name}.{NAMES(key)}": value.detach().clone() for key, value in network.state_dict().items()}
    if centering == "centering":
        model.dino_loss.apply_center_update()
        model.ibot_patch_loss.apply_center_update()
        out |= {"center": model.dino_loss.center.flatten(), "patch_center": model.ibot_patch_loss.center.flatten()}
    return out
