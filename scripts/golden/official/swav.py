"""facebookresearch/swav: all of `main_swav.main`, with apex's LARC."""

import importlib
import importlib.util
import logging
import sys
import tempfile
import types
from pathlib import Path

import torch

from machine import Loader, Samples, machine, module, named, rename
from numbers_by_name import N_BATCHES, fill, views


class Narrow:
    """The factor of a ResNet's widths that makes 64 channels `width` while blocks stay as wide as their stage."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __rmul__(self, _: int) -> int:
        return self.width


PROJECTION = [
    (r"^module\.", ""), (r"^projection_head\.0\.", "head.projection.linear0."),
    (r"^projection_head\.1\.", "head.projection.norm0."), (r"^projection_head\.3\.", "head.projection.linear1."),
    (r"^prototypes\.", "head.prototypes."),
]


def swav_name(name: str) -> str | None:
    return rename(*PROJECTION[1:])(name.removeprefix("module."))


def import_swav(paths):
    """main_swav imports apex, and pandas for its log files."""
    module("apex", amp=None)
    module("apex.parallel", Path(paths.apex) / "apex/parallel")
    if importlib.util.find_spec("pandas") is None:
        module("pandas")
    if str(paths.swav) not in sys.path:
        sys.path.insert(0, str(paths.swav))
    return importlib.import_module("main_swav"), importlib.import_module("src.resnet50")


def swav(paths, run: str, queue: int):
    main_swav, resnets = import_swav(paths)
    width, batch, groups, epochs, per_epoch = 4, 16, [(2, 64), (2, 32)], 3, 4

    def arch(**kwargs):
        network = resnets.ResNet(resnets.BasicBlock, [1, 1, 1, 1], widen=Narrow(width), **kwargs)
        fill(network, swav_name)
        return network

    data = [views(run, i, batch, groups) for i in range(N_BATCHES)]
    steps = [data[step % N_BATCHES] for step in range(epochs * per_epoch)]
    loader = Loader([steps[i * per_epoch:][:per_epoch] for i in range(epochs)])
    losses = []

    class Meter(main_swav.AverageMeter):
        def update(self, val, n=1):
            super().update(val, n)
            if n == batch:
                losses.append(val)

    def init_distributed_mode(args):
        args.rank, args.world_size, args.gpu_to_work_on = 0, 1, None

    def initialize_exp(args, *_):
        args.dump_checkpoints = args.dump_path
        return logging.getLogger("swav"), types.SimpleNamespace(update=lambda _: None)

    with tempfile.TemporaryDirectory() as dump:
        resnets.golden = arch
        argv = ["main_swav.py", "--arch", "golden", "--nmb_crops", "2", "2", "--size_crops", "64", "32",
                "--min_scale_crops", "0.14", "0.05", "--max_scale_crops", "1.0", "0.14",
                "--hidden_mlp", "12", "--feat_dim", "8", "--nmb_prototypes", "10",
                "--queue_length", str(queue), "--epoch_queue_starts", "1",
                "--epochs", str(epochs), "--batch_size", str(batch), "--base_lr", "0.3", "--wd", "0.01", "--final_lr", "0.006",
                "--freeze_prototypes_niters", "3", "--warmup_epochs", "1", "--start_warmup", "0.03",
                "--use_fp16", "false", "--sync_bn", "none", "--workers", "0", "--dump_path", dump]
        replaced = [
            (main_swav, "init_distributed_mode", init_distributed_mode), (main_swav, "initialize_exp", initialize_exp),
            (main_swav, "AverageMeter", Meter), (main_swav, "MultiCropDataset", lambda *_: Samples(range(batch * per_epoch))),
            (torch.utils.data, "DataLoader", lambda *_, **__: loader), (sys, "argv", argv),
        ]
        with machine(replaced):
            main_swav.main()
        saved = torch.load(f"{dump}/checkpoint.pth.tar", weights_only=False)
        out = named("student", saved["state_dict"], swav_name) | {"loss": torch.tensor(losses)}
        if queue:
            # By view, newest first, [V, n, D]; here by image, [n, V, D].
            out["queue"] = torch.load(f"{dump}/queue0.pth", weights_only=False)["queue"].transpose(0, 1).contiguous()
    return out
