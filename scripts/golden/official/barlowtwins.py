"""facebookresearch/barlowtwins: all of `main.main_worker`, with its model, its LARS and its schedule."""

import contextlib
import io
import json
import tempfile
import types
from pathlib import Path

import torch

from machine import Loader, Samples, machine, module, named, rename
from mocov3 import Small
from numbers_by_name import N_BATCHES, fill, views

LAYERS = ["linear0", "norm0", "relu", "linear1", "norm1", "relu", "linear2"]
NAMES = rename((r"^module\.", ""), (r"^backbone\.", ""), (r"^bn\.", "projector.mlp.norm2."),
               *[(rf"^projector\.{place}\.", f"projector.mlp.{name}.") for place, name in enumerate(LAYERS)])


def name_here(name: str) -> str | None:
    return NAMES(name.removeprefix("module."))


def import_barlowtwins(paths):
    """main.py, in which one number is another: 32, the channels of a small network, in the place of 2048."""
    code = Path(paths.barlowtwins, "main.py").read_text()
    assert code.count("[2048]") == 1
    main = module("barlowtwins_main")
    exec(compile(code.replace("[2048]", "[32]"), "main.py", "exec"), main.__dict__)
    return main


def barlowtwins(paths, run: str, steps: int, rate: float, trust: float):
    main = import_barlowtwins(paths)
    batch = 16

    class Model(main.BarlowTwins):
        def __init__(self, args):
            super().__init__(args)
            fill(self, name_here)

    class Lars(main.LARS):
        def __init__(self, parameters, **options):
            super().__init__(parameters, eta=trust, **options)

    data = [(views(run, i, batch, [(1, 64)] * 2), None) for i in range(N_BATCHES)]
    # Epochs of one step: the first ten are the warm-up.
    loader = Loader([[data[step % N_BATCHES]] for step in range(steps)])
    with tempfile.TemporaryDirectory() as folder:
        args = types.SimpleNamespace(
            rank=0, world_size=1, dist_url="", checkpoint_dir=Path(folder), data=Path(folder), workers=0,
            epochs=steps, batch_size=batch, learning_rate_weights=rate, learning_rate_biases=rate,
            weight_decay=0.01, lambd=0.0051, projector="12-12-8", print_freq=1)
        replaced = [
            (main, "BarlowTwins", Model), (main, "LARS", Lars), (torch.cuda, "set_device", lambda _: None),
            (torch.distributed, "init_process_group", lambda **_: None),
            (main.torchvision.models, "resnet50", lambda **_: Small(1)),
            (main.torchvision.datasets, "ImageFolder", lambda *_: Samples(range(batch))),
            (torch.utils.data, "DataLoader", lambda *_, **__: loader),
        ]
        with machine(replaced), contextlib.redirect_stdout(io.StringIO()):
            main.main_worker(0, args)
        saved = torch.load(f"{folder}/checkpoint.pth", weights_only=False)
        rows = Path(folder, "stats.txt").read_text().splitlines()
    # The first row is the command.
    losses = torch.tensor([json.loads(row)["loss"] for row in rows[1:]])
    return named("student", saved["model"], name_here) | {"loss": losses}
