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

    def forward(self, x, is_token=None):
        """`is_token` `[B, N]` tells the tokens of an image from those that fill up the batch, which are not attended to."""
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = None if is_token is None else is_token[:, None, None, :]
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def through(blocks, x, is_token):
    for block in blocks:
        x = block(x, is_token)
    return x


class ViT(nn.Module):
    """`cls` and what is before the patches in `pos` are empty without a class token."""

    def __init__(self, m):
        super().__init__()
        d, p, self.grid = m["width"], m["patch_px"], m["image_px"] // m["patch_px"]
        std, self.prefix = m.get("init_std", 0.02), int(m.get("class_token", True))
        self.patch = nn.Conv2d(3, d, p, p)
        self.cls = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, self.prefix, d), std=m.get("token_std", std)))
        if m.get("positions") == "sin_cos":
            self.pos = nn.Parameter(sin_cos(self.grid, d, self.prefix), requires_grad=False)
        else:
            self.pos = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, self.prefix + self.grid**2, d), std=std))
        self.blocks = nn.Sequential(*[Block(d, m["heads"], m.get("mlp_ratio", 4.0)) for _ in range(m["depth"])])
        self.norm = nn.LayerNorm(d, 1e-6)
        init_blocks(self.blocks, m)
        if m.get("initialization") == "xavier":
            nn.init.xavier_uniform_(self.patch.weight.flatten(1))
            nn.init.zeros_(self.patch.bias)

    def positions(self, side):
        """Those of the prefix, and those of the patches of a grid."""
        pos, patches = self.pos.tensor_split([self.prefix], 1)
        if side != self.grid:
            patches = patches.reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
            patches = F.interpolate(patches, size=(side, side), mode="bicubic", align_corners=False)
            patches = patches.flatten(2).transpose(1, 2)
        return pos, patches

    def before_norm(self, x, cells=None, is_token=None):
        x = self.patch(x)
        pos, patches = self.positions(x.shape[-1])
        x = x.flatten(2).transpose(1, 2) + patches
        if cells is not None:
            x = take(x, cells)
        return through(self.blocks, torch.cat([(self.cls + pos).expand(len(x), -1, -1), x], 1), is_token)

    def tokens(self, x, cells=None, is_token=None):
        """Class token and patches `[B, P + N, D]`, or only those of `cells` `[B, n]`, which alone are computed."""
        return self.norm(self.before_norm(x, cells, is_token))

    def forward(self, x):
        x = self.before_norm(x)
        return self.norm(x[:, 0] if self.prefix else x.mean(1))


def timm_names(vit):
    """The weights of a `ViT` under the names that timm gives them."""
    out = {}
    for name, values in vit.state_dict().items():
        for ours, theirs in TIMM_NAMES.items():
            name = name.replace(ours, theirs)
        if name == "cls_token" and not vit.prefix:
            continue
        out[name] = values
    return out


TIMM_NAMES = {
    ".qkv.": ".attn.qkv.", ".proj.": ".attn.proj.", ".fc1.": ".mlp.fc1.", ".fc2.": ".mlp.fc2.", "patch.": "patch_embed.proj.",
    "cls": "cls_token", "pos": "pos_embed",
}


class Decoder(nn.Module):
    """A narrow transformer that sees tokens at their cells and mask tokens at others: MAE's decoder, I-JEPA's predictor.

    `model` is the section of the backbone, `init` has the rule of the initial weights."""

    def __init__(self, model, init, width, depth, heads, output):
        super().__init__()
        self.prefix = int(model.get("class_token", True))
        self.embed, self.predict = nn.Linear(model["width"], width), nn.Linear(width, output)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, width), std=0.02))
        self.pos = nn.Parameter(sin_cos(model["image_px"] // model["patch_px"], width, 0), requires_grad=False)
        self.blocks = nn.Sequential(*[Block(width, heads, model.get("mlp_ratio", 4.0)) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, 1e-6)
        init_blocks(self, init)

    def forward(self, tokens, seen, asked, is_seen=None):
        """What is at the cells `asked` `[B, m]`; `tokens` `[B, P + n, D]` are those of the cells `seen` `[B, n]`, or of those of
        them of which `is_seen` `[B, n]` is set, without a prefix."""
        pos, x = self.pos.expand(len(tokens), -1, -1), self.embed(tokens)
        parts = [x[:, :self.prefix], x[:, self.prefix:] + take(pos, seen), self.mask_token + take(pos, asked)]
        is_token = None if is_seen is None else torch.cat([is_seen, torch.ones_like(asked, dtype=torch.bool)], 1)
        return self.predict(self.norm(through(self.blocks, torch.cat(parts, 1), is_token)[:, -asked.shape[1]:]))


def take(x, cells):
    """The rows `cells` `[B, n]` of `x` `[B, N, D]`."""
    return x.gather(1, cells.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def sin_cos(side, width, prefix):
    """Positions `[1, P + side², D]`: sines and cosines of rows, then of columns; zeros for the prefix."""
    frequencies = 1e4 ** (-torch.arange(width // 4) / (width // 4))
    cells = torch.arange(side * side)
    angles = [place.unsqueeze(1) * frequencies for place in (cells // side, cells % side)]
    table = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1)
    return torch.cat([torch.zeros(prefix, width), table]).unsqueeze(0)


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


def init_blocks(module, m):
    """Initial weights of a transformer's linear layers by the rule of its section."""
    if m.get("initialization") != "xavier":
        return init_linears(module, m.get("init_std", 0.02))
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            # Queries, keys and values are layers of their own.
            n_layers = 3 if name.endswith("qkv") else 1
            for part in linear.weight.chunk(n_layers):
                nn.init.xavier_uniform_(part)
            nn.init.zeros_(linear.bias)
