"""Backbones and heads of the small recipes in PyTorch."""

import torch
import torch.nn.functional as F
import torchvision
from torch import nn


def build(model):
    """The backbone of a recipe's `model`, and the channels of what it returns [B, D]."""
    if model["arch"] == "vit":
        return ViT(model), model["width"]
    return resnet(model)


def resnet(model):
    """torchvision's ResNet without its classifier; with a small stem as CIFAR's are: 3x3, stride 1, no pooling."""
    if "width" in model:
        raise SystemExit("model.width of a ResNet is not supported here")
    network = getattr(torchvision.models, f"resnet{model['depth']}")()
    width, network.fc = network.fc.in_features, nn.Identity()
    if model.get("stem") == "small":
        network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    return network, width


class Block(nn.Module):
    def __init__(self, d, heads, ratio):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d, 1e-6), nn.LayerNorm(d, 1e-6)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, int(ratio * d)), nn.Linear(int(ratio * d), d)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, m):
        super().__init__()
        d, p, self.grid = m["width"], m["patch_px"], m["image_px"] // m["patch_px"]
        std = m.get("init_std", 0.02)
        self.patch = nn.Conv2d(3, d, p, p)
        self.cls = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, d), std=std))
        self.pos = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1 + self.grid**2, d), std=std))
        self.blocks = nn.Sequential(*[Block(d, m["heads"], m.get("mlp_ratio", 4.0)) for _ in range(m["depth"])])
        self.norm = nn.LayerNorm(d, 1e-6)
        init_linears(self.blocks, std)

    def forward(self, x):
        x = self.patch(x)
        pos, side = self.pos, x.shape[-1]
        if side != self.grid:
            patches = pos[:, 1:].reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
            patches = F.interpolate(patches, size=(side, side), mode="bicubic", align_corners=False)
            pos = torch.cat([pos[:, :1], patches.flatten(2).transpose(1, 2)], 1)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1) + pos
        return self.norm(self.blocks(x)[:, 0])


class DinoHead(nn.Module):
    def __init__(self, d, m):
        super().__init__()
        h, z = m.get("head_hidden", 2048), m.get("head_bottleneck", 256)
        self.mlp = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, z))
        init_linears(self.mlp, m.get("head_init_std", 0.02))
        self.prototypes = nn.Parameter(torch.empty(m["prototypes"], z).uniform_(-(z**-0.5), z**-0.5))

    def forward(self, x):
        return F.normalize(self.mlp(x), dim=-1) @ F.normalize(self.prototypes, dim=-1).T


def projection(d, m):
    """Linear layers with batch normalization and rectifiers between them."""
    widths = [d, *m["head_hidden"]]
    layers = []
    for i, o in zip(widths, widths[1:]):
        layers += [nn.Linear(i, o), *([nn.BatchNorm1d(o)] if m.get("head_batch_norm") else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], m["head_output"]))


def init_linears(module, std):
    for linear in (m for m in module.modules() if isinstance(m, nn.Linear)):
        nn.init.trunc_normal_(linear.weight, std=std)
        nn.init.zeros_(linear.bias)
