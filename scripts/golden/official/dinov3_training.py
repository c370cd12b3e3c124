"""DINOv3's formulas in PyTorch, on the backbone of transformers. The official training code runs on a CPU, and was run beside this
program (equal to 1e-6 over twelve steps); none of it is in this repository, and these numbers are those of the formulas.
Masks with exact counts, Sinkhorn and Knopp, heads without weight normalization, a weight of local pairs, KoLeo and Gram anchoring."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from dinov2_training import BATCH, masks
from numbers_by_name import N_BATCHES, uniform, views

D, DEPTH, HEADS, HIDDEN, PATCH, STEPS = 24, 2, 2, 48, 8, 12
GROUPS = [(2, 32), (2, 16), (2, 64)]


def given(name: str, shape: list[int]) -> torch.Tensor:
    """As `fill`."""
    numbers = torch.from_numpy(uniform(name, math.prod(shape))).view(shape)
    if len(shape) > 1:
        numbers = (numbers * 2 - 1) * (6.0 / math.prod(shape[1:])) ** 0.5
    elif name.endswith("weight"):
        numbers = numbers + 0.5
    else:
        numbers = numbers * 0.2 - 0.1
    return numbers.float().double()


def shapes() -> dict[str, list[int]]:
    out = {"cls_token": [1, 1, D], "mask_token": [1, D], "reg_token": [1, 2, D], "patch_embed.proj.weight": [D, 3, PATCH, PATCH],
           "patch_embed.proj.bias": [D], "norm.weight": [D], "norm.bias": [D]}
    for i in range(DEPTH):
        for name, outputs, inputs in (("attn.qkv", 3 * D, D), ("attn.proj", D, D), ("mlp.fc1", HIDDEN, D), ("mlp.fc2", D, HIDDEN)):
            out |= {f"blocks.{i}.{name}.weight": [outputs, inputs], f"blocks.{i}.{name}.bias": [outputs]}
        for name in ("norm1", "norm2"):
            out |= {f"blocks.{i}.{name}.weight": [D], f"blocks.{i}.{name}.bias": [D]}
        out |= {f"blocks.{i}.ls{k}.gamma": [D] for k in (1, 2)}
    return out


def theirs(name: str) -> list[str]:
    """Names in transformers."""
    fixed = {"cls_token": "embeddings.cls_token", "mask_token": "embeddings.mask_token", "reg_token": "embeddings.register_tokens"}
    if name in fixed:
        return [fixed[name]]
    if name.startswith("patch_embed"):
        return [name.replace("patch_embed.proj", "embeddings.patch_embeddings")]
    if not name.startswith("blocks"):
        return [name]
    _, number, part = name.split(".", 2)
    prefix, kind = f"model.layer.{number}.", part.rsplit(".", 1)[1]
    if part.startswith("attn.qkv"):
        return [f"{prefix}attention.{which}_proj.{kind}" for which in "qkv"]
    for ours, here in (("attn.proj", "attention.o_proj"), ("mlp.fc1", "mlp.up_proj"), ("mlp.fc2", "mlp.down_proj"),
                       ("ls1.gamma", "layer_scale1.lambda1"), ("ls2.gamma", "layer_scale2.lambda1")):
        if part.startswith(ours):
            return [prefix + part.replace(ours, here)]
    return [prefix + part]


def backbone():
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    net = DINOv3ViTModel(DINOv3ViTConfig(
        hidden_size=D, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=HIDDEN, image_size=32, patch_size=PATCH,
        num_register_tokens=2, layer_norm_eps=1e-6, pos_embed_rescale=None, attn_implementation="eager")).double().train()
    state = {}
    for name, shape in shapes().items():
        parts = theirs(name)
        for part, value in zip(parts, given(name, shape).chunk(len(parts))):
            if part in net.state_dict():
                state[part] = value.view(net.state_dict()[part].shape)
    net.load_state_dict(state)
    return net


class Head(nn.Module):
    def __init__(self, name: str, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(D, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck))
        self.last_layer = nn.Linear(bottleneck, prototypes, bias=False)
        self.double().load_state_dict({key: given(f"{name}.{key}", list(value.shape)) for key, value in self.state_dict().items()})

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


def through(net, crops, hidden=None):
    """Class tokens and patches."""
    masked = {} if hidden is None else {"bool_masked_pos": hidden}
    tokens = net(pixel_values=crops, **masked).last_hidden_state
    return tokens[:, 0], tokens[:, 3:]


def sinkhorn(scores, temperature):
    q = torch.exp((scores - scores.max()) / temperature).t()
    q /= q.sum()
    k, b = q.shape
    for _ in range(3):
        q /= q.sum(1, keepdim=True) * k
        q /= q.sum(0, keepdim=True) * b
    return (q * b).t()


def entropy(targets, scores):
    return -(targets * F.log_softmax(scores / 0.1, -1)).sum(-1)


def koleo(x):
    x = F.normalize(x, dim=-1)
    dots = (x @ x.t()).detach().fill_diagonal_(-1)
    return -torch.log((x - x[dots.argmax(1)]).add(1e-8).norm(dim=-1) + 1e-8).mean()


def similarities(x):
    x = F.normalize(x, dim=-1)
    return x @ x.transpose(1, 2)


def losses(student, teacher, anchor, data, chosen, temperature):
    first, local, larger = (torch.cat(data[start:start + 2]) for start in (0, 2, 4))
    net, head, patch_head = student
    with torch.no_grad():
        tokens, patches = through(teacher[0], first)
        targets = sinkhorn(teacher[1](tokens), temperature).chunk(2)
        patch_targets = sinkhorn(teacher[2](patches[chosen]), temperature)
    tokens, patches = through(net, first, chosen)
    locals_, _ = through(net, local)
    views_ = head(tokens).chunk(2), head(locals_).chunk(2)
    between = sum(entropy(targets[v], views_[0][u]).mean() for v in range(2) for u in range(2) if u != v)
    smaller = sum(entropy(targets[v], view).mean() for v in range(2) for view in views_[1])
    loss = (between + 0.5 * smaller) / 6
    weights = (1 / chosen.sum(-1).clamp(min=1)).unsqueeze(-1).expand_as(chosen)[chosen]
    loss = loss + (entropy(patch_targets, patch_head(patches[chosen])) * weights).sum() / len(chosen)
    loss = loss + 0.1 * sum(koleo(part) for part in tokens.chunk(2))
    if anchor is not None:
        with torch.no_grad():
            _, kept = through(anchor, larger)
            maps = kept.transpose(1, 2).reshape(len(kept), D, 8, 8)
            kept = F.interpolate(maps, size=(4, 4), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
        loss = loss + 2.0 * F.mse_loss(similarities(patches), similarities(kept))
    return loss


def groups(student):
    """Parameters with rates by layer, decay and last layers."""
    out = []
    for number, module in enumerate(student):
        for name, param in module.named_parameters():
            layer = DEPTH + 1
            if number == 0:
                layer = 0 if name.startswith("embeddings") else int(name.split(".")[2]) + 1 if "layer." in name else layer
            rate = 0.9 ** (DEPTH + 1 - layer) * (0.2 if "patch_embeddings" in name else 1)
            decays = not (name.endswith("bias") or "norm" in name or "lambda1" in name)
            out.append({"params": [param], "rate": rate, "decays": decays, "last": "last_layer" in name})
    return out


def cosine(start, end, step, steps):
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * step / steps))


def dinov3(run: str):
    student = [backbone(), Head("head", 12, 8, 16), Head("patch_head", 10, 6, 20)]
    teacher = [copy.deepcopy(module).requires_grad_(False) for module in student]
    optimizer = torch.optim.AdamW(groups(student), betas=(0.9, 0.999))
    anchor, seen, rates = None, [], []
    for step in range(STEPS):
        rate = 0.005 * step / 3 if step < 4 else cosine(0.005, 1e-5, step - 4, STEPS - 4)
        rates.append(rate)
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if group["last"] and step < 2 else rate * group["rate"]
            group["weight_decay"] = cosine(0.04, 0.4, step, STEPS) if group["decays"] else 0.0
        chosen = masks(step, BATCH, 2, 4, 0.5, (0.1, 0.5), exact=True).transpose(0, 1).flatten(0, 1)
        temperature = 0.04 + 0.03 * min(step / 3, 1)
        loss = losses(student, teacher, anchor, views(run, step % N_BATCHES, BATCH, GROUPS), chosen, temperature)
        optimizer.zero_grad()
        loss.backward()
        for module in student:
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
        stays = cosine(0.9, 1.0, step, STEPS)
        with torch.no_grad():
            for mine, theirs_ in zip(student, teacher):
                for new, old in zip(mine.parameters(), theirs_.parameters()):
                    old.mul_(stays).add_(new, alpha=1 - stays)
        # The first copy is made before step 4, and another one every four steps.
        if step + 1 >= 4 and (step + 1 - 4) % 4 == 0:
            anchor = copy.deepcopy(teacher[0])
        seen.append(loss.detach())
    out = {"loss": torch.stack(seen), "lr": torch.tensor(rates)}
    for which, modules in (("student", student), ("teacher", teacher), ("gram_teacher", [anchor])):
        state = modules[0].state_dict()
        for name, shape in shapes().items():
            first = given(name, shape).chunk(len(theirs(name)))
            parts = [state[part].reshape(value.shape) if part in state else value for part, value in zip(theirs(name), first)]
            out[f"{which}.{name}"] = torch.cat(parts)
        for number, head in enumerate(("head", "patch_head")[: len(modules) - 1]):
            out |= {f"{which}.{head}.{key}": value for key, value in modules[number + 1].state_dict().items()}
    return {key: value.detach().clone() for key, value in out.items()}
