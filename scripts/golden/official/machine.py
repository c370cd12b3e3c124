"""What the official scripts find around them: a machine whose GPU is the CPU, and fixed views in the place of data."""

import contextlib
import importlib.machinery
import re
import sys
import types

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode


class Machine(TorchFunctionMode):
    """A machine whose GPU is the CPU, whose single precision is what `torch.get_default_dtype()` says, and whose
    `torch.randn` can be told what to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.randn = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.float:
            return args[0].to(torch.get_default_dtype())
        is_gpu = lambda value: (isinstance(value, torch.device) and value.type == "cuda") or (
            isinstance(value, str) and value.startswith("cuda"))
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.get_default_dtype()
        if func is torch.Tensor.to:
            args = tuple("cpu" if is_gpu(value) else value for value in args)
        if func is torch.randn and self.randn is not None:
            return self.randn(*args)
        return func(*args, **kwargs)


class Alone(nn.parallel.DistributedDataParallel):
    """DistributedDataParallel on a CPU, which may not name devices."""

    def __init__(self, module: nn.Module, device_ids=None) -> None:
        super().__init__(module)


@contextlib.contextmanager
def machine(replaced: list[tuple[object, str, object]]):
    """What the official scripts find: no fused synchronization of batch norm in a world of one, no CUDA to wait for."""
    everywhere = [
        (nn.parallel, "DistributedDataParallel", Alone),
        (nn.SyncBatchNorm, "convert_sync_batchnorm", staticmethod(lambda module, process_group=None: module)),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.hub, "list", lambda *_, **__: []),
    ]
    before = []
    for owner, name, value in everywhere + replaced:
        before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)
    try:
        with Machine() as mode:
            yield mode
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def module(name: str, path: str | None = None, **content) -> types.ModuleType:
    """A module of this name: an empty one, or a package whose files are found but whose `__init__` is not run."""
    made = types.ModuleType(name)
    # torch asks for the specification of some modules, pandas among them.
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        made.__path__ = [str(path)]
    made.__dict__.update(content)
    sys.modules[name] = made
    return made


class Loader(list):
    """Fixed batches in the place of a DataLoader. `epochs` lists of batches, one after another."""

    def __init__(self, epochs: list[list]) -> None:
        super().__init__(epochs[0])
        self.epochs, self.next = epochs, 0
        self.sampler = types.SimpleNamespace(set_epoch=lambda _: None)

    def __iter__(self):
        batches = self.epochs[self.next % len(self.epochs)]
        self.next += 1
        return iter(batches)


class Samples(list):
    """In the place of a data set."""


def rename(*rules: tuple[str, str]):
    """Name of a parameter here, by the first rule that fits; none where a rule says so."""

    def name_here(name: str) -> str | None:
        if name.endswith("num_batches_tracked"):
            return None
        for pattern, to in rules:
            if re.match(pattern, name):
                return re.sub(pattern, to, name, count=1)
        return name

    return name_here


def named(prefix: str, state: dict[str, torch.Tensor], name_here) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name_here(name)}": value.detach().clone() for name, value in state.items()
            if name_here(name) is not None}
