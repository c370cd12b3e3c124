"""Distillation of a frozen transformer into one with larger patches, written out with timm's transformers and PyTorch's AdamW."""

import math

import timm
import torch
import torch.nn.functional as F

from machine import machine, rename
from numbers_by_name import N_BATCHES, fill, views

HEADS = rename((r"^pooled\.", "pooled.linear.linear0."), (r"^patches\.", "patches.linear.linear0."))


def transformer(patch: int, width: int, depth: int):
    return timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=patch, embed_dim=width, depth=depth, num_heads=2, mlp_ratio=2, num_classes=0, global_pool="")


def distance(kind: str, x, y):
    if kind == "squared":
        return F.mse_loss(x, y)
    return 1 - F.cosine_similarity(x, y, dim=-1).mean()


def distillation(run: str, kind: str):
    batch, n_steps, rate = 16, 12, 4e-3
    losses = []
    with machine([]):
        teacher, student = transformer(4, 16, 1), transformer(8, 24, 2)
        heads = torch.nn.ModuleDict({"pooled": torch.nn.Linear(24, 16), "patches": torch.nn.Linear(24, 16)})
        for network in (teacher, student):
            fill(network, lambda name: name)
        fill(heads, HEADS)
        teacher.requires_grad_(False).eval()
        trained = [*student.parameters(), *heads.parameters()]
        optimizer = torch.optim.AdamW(trained, weight_decay=0.05)
        for step in range(n_steps):
            x = torch.cat(views(run, step % N_BATCHES, batch, [(2, 32)]))
            given, target = student(x), teacher(x)
            pooled = distance(kind, heads["pooled"](given[:, 0]), target[:, 0])
            grid = heads["patches"](given[:, 1:]).transpose(1, 2).unflatten(2, (4, 4))
            grid = F.interpolate(grid, size=(8, 8), mode="bilinear").flatten(2).transpose(1, 2)
            patches = distance(kind, grid, target[:, 1:])
            loss = 0.7 * pooled + 0.4 * patches
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / n_steps))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    out = {"loss": torch.tensor(losses)}
    out |= {f"teacher.{name}": value for name, value in teacher.state_dict().items()}
    out |= {f"student.{name}": value for name, value in student.state_dict().items()}
    return out | {f"student.{HEADS(name)}": value for name, value in heads.state_dict().items()}
