"""facebookresearch/dino: all of `main_dino.train_dino`; with the losses and the clipping of facebookresearch/dinov2, too."""

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn

from machine import Loader, Samples, machine, module, named
from numbers_by_name import N_BATCHES, fill, views
from swav import Narrow, import_swav


def dino_name(name: str) -> str | None:
    if name.endswith("num_batches_tracked"):
        return None
    return name.removeprefix("module.").removeprefix("backbone.")


def dino_learns(name: str) -> str | None:
    """Without the gain that is no parameter here."""
    return None if name.endswith("weight_g") else dino_name(name)


def import_dino(paths):
    if str(paths.dino) not in sys.path:
        sys.path.insert(0, str(paths.dino))
    torch.hub.list, before = (lambda *_, **__: []), torch.hub.list
    try:
        names = ("main_dino", "utils", "vision_transformer")
        return [importlib.import_module(name) for name in names]
    finally:
        torch.hub.list = before


def dino(paths, run: str, arch: str, norm_last_layer: bool, options: list[str], groups, epochs: int = 4, more_losses=None):
    """All of `train_dino`. `more_losses(main_dino, utils, features)` gives what else is replaced; `features` is a list whose last
    entry is what the head that ran last was given."""
    main_dino, utils, vits = import_dino(paths)
    _, resnets = import_swav(paths)
    batch, per_epoch, losses, features = 16, 4, [], [None]
    name_here = dino_learns if norm_last_layer else dino_name

    def vit(patch_size, **kwargs):
        return vits.VisionTransformer(img_size=[32], patch_size=patch_size, embed_dim=24, depth=2, num_heads=2, mlp_ratio=2,
                                      qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6), **kwargs)

    def resnet():
        network = resnets.ResNet(resnets.BasicBlock, [1, 1, 1, 1], widen=Narrow(4))
        network.fc = nn.Linear(32, 1)
        return network

    init = utils.MultiCropWrapper.__init__

    def init_and_fill(network, backbone, head):
        init(network, backbone, head)
        fill(network, dino_name)
        network.head.register_forward_pre_hook(lambda _, given: features.__setitem__(-1, given[0]))

    class Logger(utils.MetricLogger):
        def update(self, **kwargs):
            super().update(**kwargs)
            losses.extend([kwargs["loss"]] if "loss" in kwargs else [])

    data = [(views(run, i, batch, groups), None) for i in range(N_BATCHES)]
    steps = [data[step % N_BATCHES] for step in range(epochs * per_epoch)]
    loader = Loader([steps[i * per_epoch:][:per_epoch] for i in range(epochs)])

    def init_distributed_mode(args):
        args.rank, args.world_size, args.gpu = 0, 1, 0

    with tempfile.TemporaryDirectory() as output:
        argv = [
            "--patch_size", "8", "--out_dim", "16", "--norm_last_layer", str(norm_last_layer).lower(),
            "--teacher_temp", "0.05", "--warmup_teacher_temp", "0.05", "--warmup_teacher_temp_epochs", "0",
            "--use_fp16", "false", "--batch_size_per_gpu", str(batch), "--epochs", str(epochs), "--freeze_last_layer", "1",
            "--warmup_epochs", "1", "--momentum_teacher", "0.9", "--drop_path_rate", "0",
            "--local_crops_number", str(groups[1][0]), "--output_dir", output, "--saveckp_freq", "0", *options]
        replaced = [
            (utils, "init_distributed_mode", init_distributed_mode), (utils.MultiCropWrapper, "__init__", init_and_fill),
            (utils, "MetricLogger", Logger), (main_dino.datasets, "ImageFolder", lambda *_, **__: Samples(range(64))),
            (torch.utils.data, "DataLoader", lambda *_, **__: loader),
            (main_dino, "DINOHead", partial(main_dino.DINOHead, hidden_dim=12, bottleneck_dim=8)),
        ]
        replaced += more_losses(main_dino, utils, features) if more_losses else []
        vits.golden_vit, main_dino.torchvision_models.golden_resnet = vit, resnet
        with machine(replaced), contextlib.redirect_stdout(io.StringIO()):
            args = argparse.ArgumentParser(parents=[main_dino.get_args_parser()]).parse_args(argv)
            # The parser knows the published ones alone.
            args.arch = arch
            main_dino.train_dino(args)
        saved = torch.load(f"{output}/checkpoint.pth", weights_only=False)
    out = named("student", saved["student"], name_here) | named("teacher", saved["teacher"], name_here)
    out |= {"loss": torch.tensor(losses), "center": saved["dino_loss"]["center"].flatten()}
    out = {key: value for key, value in out.items() if not (more_losses and key == "center")}
    return out


DINO_VIT = ["--optimizer", "adamw", "--lr", "0.02", "--min_lr", "1e-5", "--clip_grad", "0.3",
            "--weight_decay", "0.04", "--weight_decay_end", "0.4"]
DINO_RESNET = ["--optimizer", "sgd", "--lr", "0.16", "--min_lr", "1e-5", "--clip_grad", "0.3",
               "--weight_decay", "0.01", "--weight_decay_end", "0.05"]


def balanced(paths):
    """DINOv2's losses and its clipping by module in DINO's loop: DINOv2's own needs xFormers, FSDP and CUDA."""

    def more(main_dino, utils, features):
        koleo, cls = import_dinov2(paths)

        class Loss(cls.DINOLoss):
            def __init__(self, out_dim, ncrops, *_):
                super().__init__(out_dim)
                self.ncrops, self.koleo = ncrops, koleo.KoLeoLoss()

            def forward(self, student, teacher, _):
                views, tokens = student.chunk(self.ncrops), features[-1].chunk(self.ncrops)
                first, second = self.sinkhorn_knopp_teacher(teacher, 0.07).chunk(2)
                of = super().forward
                # As train/ssl_meta_arch.py, with as many terms as there are pairs.
                total = of(list(views[2:]), [first, second]) + of([views[0]], [second]) + of([views[1]], [first])
                return total / (2 * self.ncrops - 2) + 0.1 * sum(self.koleo(tokens[view]) for view in range(2))

        def clip(student, largest):
            for part in (student.module.backbone, student.module.head):
                nn.utils.clip_grad_norm_(part.parameters(), largest)

        return [(main_dino, "DINOLoss", Loss), (utils, "clip_gradients", clip)]

    return more


def import_dinov2(paths):
    module("dinov2", Path(paths.dinov2) / "dinov2")
    module("dinov2.loss", Path(paths.dinov2) / "dinov2/loss")
    return [importlib.import_module(f"dinov2.loss.{name}") for name in ("koleo_loss", "dino_clstoken_loss")]
