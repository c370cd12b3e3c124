"""Semantic segmentation with a transformer and a linear or a convolutional decoder, written out with timm's transformer and
PyTorch's interpolation, cross-entropy and AdamW.

As in DINO, positions and the class token are decayed."""

import math

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

from machine import machine
from numbers_by_name import N_BATCHES, fill, views

BATCH, N_STEPS, WARMUP, SIZE, PATCH, WIDTH, HIDDEN, N_CLASSES = 16, 10, 3, 32, 8, 24, 12, 3
RATE, END, DECAY, IGNORED = 5e-3, 1e-5, 0.05, 255


class Network(nn.Module):
    """A transformer whose patches a decoder reads."""

    def __init__(self, decoder: str) -> None:
        super().__init__()
        self.backbone = timm.models.vision_transformer.VisionTransformer(
            img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=2, num_heads=2, mlp_ratio=2, num_classes=0)
        layers = {"scores": nn.Linear(HIDDEN if decoder == "conv" else WIDTH, N_CLASSES)}
        if decoder == "conv":
            layers["hidden"] = nn.ModuleDict({
                "conv": nn.Conv2d(WIDTH, HIDDEN, 3, padding=1, bias=False), "norm": nn.LayerNorm(HIDDEN, eps=1e-6)})
        self.decoder = nn.ModuleDict(layers)

    def forward(self, x):
        x = self.backbone.forward_features(x)[:, 1:]
        side = SIZE // PATCH
        if "hidden" in self.decoder:
            hidden = self.decoder["hidden"]
            maps = hidden["conv"](x.transpose(1, 2).reshape(BATCH, WIDTH, side, side))
            x = F.gelu(hidden["norm"](maps.flatten(2).transpose(1, 2)))
        scores = self.decoder["scores"](x).transpose(1, 2).reshape(BATCH, N_CLASSES, side, side)
        return F.interpolate(scores, (SIZE, SIZE), mode="bilinear", align_corners=False)


def masks(index: int):
    """Masks [B, S, S] of batch `index`: steps of a staircase, with pixels that do not count."""
    image, y, x = torch.meshgrid(torch.arange(BATCH), torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    classes = (x // 4 + y // 8 + image + index) % N_CLASSES
    return torch.where((x + 3 * y + image) % 7 == 0, IGNORED, classes)


def name_here(name: str) -> str:
    return name.removeprefix("backbone.")


def segmentation(run: str, decoder: str):
    losses, rates, grads = [], [], {}
    with machine([]):
        network = Network(decoder)
        fill(network, name_here)
        decayed = [p for p in network.parameters() if p.dim() > 1]
        others = [p for p in network.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}])
        for step in range(N_STEPS):
            index = step % N_BATCHES
            x = views(run, index, BATCH, [(1, SIZE)])[0]
            loss = F.cross_entropy(network(x), masks(index), ignore_index=IGNORED)
            half = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (N_STEPS - WARMUP)))
            rate = RATE * step / WARMUP if step < WARMUP else END + (RATE - END) * half
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                grads = {f"grad.{name_here(name)}": parameter.grad.clone() for name, parameter in network.named_parameters()}
            optimizer.step()
            losses.append(loss.item())
            rates.append(rate)
    out = {f"network.{name_here(name)}": value for name, value in network.state_dict().items()}
    return out | grads | {"loss": torch.tensor(losses), "lr": torch.tensor(rates)}
