"""BYOL, written out with timm's transformer and PyTorch's SGD: its authors' code is in JAX."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from distillation import transformer
from machine import machine, named, rename
from numbers_by_name import N_BATCHES, fill, views

LAYERS = ["linear0", "norm0", "relu", "linear1"]
NAMES = rename((r"^backbone\.", ""),
               *[(rf"^{head}\.{place}\.", f"{head}.mlp.{name}.")
                 for head in ("projector", "predictor") for place, name in enumerate(LAYERS)])


def name_here(name: str) -> str | None:
    """Names without the biases before a normalization, which are no parameters here."""
    name = NAMES(name)
    return None if name is None or name.endswith("mlp.linear0.bias") else name


def perceptron(width: int, hidden: int, output: int) -> nn.Sequential:
    """As the paper's: a bias before the normalization, and none after it."""
    first = nn.Linear(width, hidden)
    nn.init.zeros_(first.bias)
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, output, bias=False))


def network(has_predictor: bool) -> nn.ModuleDict:
    parts = nn.ModuleDict({"backbone": transformer(8, 24, 2), "projector": perceptron(24, 12, 8)})
    if has_predictor:
        parts["predictor"] = perceptron(8, 12, 8)
    return parts


def distance(q, z):
    """Equation 2: the squared distance of vectors of length one."""
    return (F.normalize(q) - F.normalize(z)).square().sum(1).mean()


def byol(run: str, n_steps: int, rate: float):
    batch, warmup, losses = 16, 4, []
    with machine([]):
        online, target = network(True), network(False)
        fill(online, name_here)
        fill(target, name_here)
        target.requires_grad_(False)
        optimizer = torch.optim.SGD(online.parameters(), rate, momentum=0.9, weight_decay=0.01)
        for step in range(n_steps):
            x = views(run, step % N_BATCHES, batch, [(1, 32)] * 2)
            q = [online["predictor"](online["projector"](online["backbone"](view)[:, 0])) for view in x]
            z = [target["projector"](target["backbone"](view)[:, 0]) for view in x]
            loss = distance(q[0], z[1]) + distance(q[1], z[0])
            done = (step - warmup) / (n_steps - warmup)
            factor = step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done))
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # τ = 1 - (1 - 0.9) (cos(π k / K) + 1) / 2
            tau = 1 - (1 - 0.9) * (math.cos(math.pi * step / n_steps) + 1) / 2
            averaged = dict(online.named_parameters())
            for name, parameter in target.named_parameters():
                parameter.mul_(tau).add_(averaged[name].detach(), alpha=1 - tau)
            losses.append(loss.item())
    out = named("online", online.state_dict(), name_here) | named("target", target.state_dict(), name_here)
    return out | {"loss": torch.tensor(losses)}
