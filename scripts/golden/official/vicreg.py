"""facebookresearch/vicreg: all of `main_vicreg.main`, with its model, ResNet, LARS and schedule."""

import contextlib
import importlib
import io
import sys
import tempfile
import types
from pathlib import Path

import torch

from machine import Loader, Samples, machine, module, named, rename
from numbers_by_name import N_BATCHES, fill, views
from swav import Narrow

LAYERS = ["linear0", "norm0", "relu", "linear1", "norm1", "relu", "linear2"]
NAMES = rename((r"^backbone\.", ""),
               *[(rf"^projector\.{place}\.", f"projector.mlp.{name}.") for place, name in enumerate(LAYERS)])


def name_here(name: str) -> str | None:
    """Names without the biases before a normalization, which are no parameters here."""
    name = NAMES(name.removeprefix("module."))
    return None if name in ("projector.mlp.linear0.bias", "projector.mlp.linear1.bias") else name


def import_vicreg(paths):
    # Files of these names are in other repositories as well.
    module("augmentations", TrainTransform=lambda: None)
    module("distributed", init_distributed_mode=lambda args: None)
    if str(paths.vicreg) not in sys.path:
        sys.path.insert(0, str(paths.vicreg))
    return importlib.import_module("main_vicreg"), importlib.import_module("resnet")


def vicreg(paths, run: str, steps: int, rate: float, trust: float):
    main, resnets = import_vicreg(paths)
    batch, losses = 16, []

    def small(**_):
        return resnets.ResNet(resnets.BasicBlock, [1, 1, 1, 1], widen=Narrow(4)), 32

    class Model(main.VICReg):
        def __init__(self, args):
            super().__init__(args)
            fill(self, name_here)
            for layer in (self.projector[0], self.projector[3]):
                torch.nn.init.zeros_(layer.bias)

        def forward(self, x, y):
            loss = super().forward(x, y)
            losses.append(loss.item())
            return loss

    class Lars(main.LARS):
        def __init__(self, parameters, **options):
            super().__init__(parameters, eta=trust, **options)

    data = [(views(run, i, batch, [(1, 64)] * 2), None) for i in range(N_BATCHES)]
    # Epochs of one step: the first ten are the warm-up.
    loader = Loader([[data[step % N_BATCHES]] for step in range(steps)])
    with tempfile.TemporaryDirectory() as folder:
        args = types.SimpleNamespace(
            rank=0, world_size=1, device="cuda", exp_dir=Path(folder), data_dir=Path(folder), num_workers=0,
            log_freq_time=0, arch="golden", mlp="12-12-8", epochs=steps, batch_size=batch, base_lr=rate,
            wd=0.01, sim_coeff=25.0, std_coeff=25.0, cov_coeff=1.0)
        resnets.golden = small
        replaced = [
            (main, "VICReg", Model), (main, "LARS", Lars),
            (main.datasets, "ImageFolder", lambda *_: Samples(range(batch))),
            (torch.utils.data, "DataLoader", lambda *_, **__: loader),
        ]
        with machine(replaced), contextlib.redirect_stdout(io.StringIO()):
            main.main(args)
        saved = torch.load(f"{folder}/model.pth", weights_only=False)
    return named("student", saved["model"], name_here) | {"loss": torch.tensor(losses)}
