"""Fine-tuning of a transformer with a linear head, written out with timm's transformer and PyTorch's AdamW.

Rates by layer are those of BEiT and MAE, the schedule is MAE's, and labels are smoothed by PyTorch; those of images with several
classes are smoothed as in timm's BinaryCrossEntropy of dense targets. As in DINO, positions and the class token are decayed. With
adapters of low rank (LoRA), these and the head alone are trained."""

import math

import timm
import torch
import torch.nn.functional as F

from machine import machine
from numbers_by_name import N_BATCHES, fill, uniform, views

BATCH, N_STEPS, WARMUP, SIZE, N_CLASSES, DEPTH = 16, 10, 3, 32, 5, 2
RATE, END, LAYER_DECAY, DECAY, SMOOTHING = 5e-3, 1e-5, 0.65, 0.05, 0.1
# The embedding, the blocks and the norm.
N_UNITS = DEPTH + 2


def unit(name: str) -> int:
    """Index of the unit that a parameter belongs to; the head is beside the norm."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return N_UNITS - 1 if name.startswith(("norm.", "head.")) else 0


def several_labels(index: int) -> torch.Tensor:
    """Classes of the images of batch `index`, `[B, C]`: a second one of every third image, and none of every seventh."""
    labels = torch.zeros(BATCH, N_CLASSES)
    for image in range(BATCH):
        if image % 7 != 6:
            labels[image, (image + index) % N_CLASSES] = 1
            if image % 3 == 0:
                labels[image, (image + index + 2) % N_CLASSES] = 1
    return labels


def loss_of(scores: torch.Tensor, index: int, has_several: bool) -> torch.Tensor:
    """Loss of the scores of batch `index`."""
    if has_several:
        targets = several_labels(index) * (1 - SMOOTHING) + SMOOTHING / 2
        return F.binary_cross_entropy_with_logits(scores, targets)
    labels = (torch.arange(BATCH) + index) % N_CLASSES
    return F.cross_entropy(scores, labels, label_smoothing=SMOOTHING)


def adapters(network: torch.nn.Module, rank: int) -> dict[str, torch.nn.Parameter]:
    """A, `[rank, inputs]`, and B, `[outputs, rank]`, of each weight that has an adapter. Both have numbers as in `fill`, so that
    both have gradients from the first step on."""
    matrices = {}
    for name, weight in network.named_parameters():
        if name.endswith(("attn.qkv.weight", "mlp.fc1.weight", "mlp.fc2.weight")):
            outputs, inputs = weight.shape
            for end, shape in ((".lora_a", (rank, inputs)), (".lora_b", (outputs, rank))):
                numbers = torch.from_numpy(uniform(name + end, shape[0] * shape[1])).view(shape)
                numbers = ((numbers * 2 - 1) * (6.0 / shape[1]) ** 0.5).float()
                matrices[name + end] = torch.nn.Parameter(numbers.to(weight.dtype))
    return matrices


def sums(network: torch.nn.Module, matrices: dict[str, torch.nn.Parameter], scale: float) -> dict[str, torch.Tensor]:
    """The parameters of the network, with W + scale · B · A in the place of each W that has an adapter."""
    parameters = dict(network.named_parameters())
    for name, weight in network.named_parameters():
        if name + ".lora_a" in matrices:
            parameters[name] = weight + scale * matrices[name + ".lora_b"] @ matrices[name + ".lora_a"]
    return parameters


def classification(run: str, trained_units: int, rank: int = 0, alpha: float = 0.0, has_several: bool = False):
    losses, rates, grads = [], [], {}
    with machine([]):
        network = timm.models.vision_transformer.VisionTransformer(
            img_size=SIZE, patch_size=8, embed_dim=24, depth=DEPTH, num_heads=2, mlp_ratio=2, num_classes=N_CLASSES)
        fill(network, lambda name: name)
        matrices = adapters(network, rank) if rank else {}
        groups = []
        for name, parameter in [*network.named_parameters(), *matrices.items()]:
            if rank:
                parameter.requires_grad_(name in matrices or name.startswith("head."))
            else:
                parameter.requires_grad_(unit(name) >= N_UNITS - trained_units)
            if parameter.requires_grad:
                decay = DECAY if parameter.dim() > 1 else 0
                scale = LAYER_DECAY ** (N_UNITS - 1 - unit(name))
                groups.append({"params": [parameter], "weight_decay": decay, "scale": scale})
        optimizer = torch.optim.AdamW(groups)
        for step in range(N_STEPS):
            index = step % N_BATCHES
            x = views(run, index, BATCH, [(1, SIZE)])[0]
            parameters = sums(network, matrices, alpha / max(rank, 1))
            loss = loss_of(torch.func.functional_call(network, parameters, (x,)), index, has_several)
            half = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (N_STEPS - WARMUP)))
            rate = RATE * step / WARMUP if step < WARMUP else END + (RATE - END) * half
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                grads = {f"grad.{name}": parameter.grad.clone()
                         for name, parameter in [*network.named_parameters(), *matrices.items()] if parameter.requires_grad}
            optimizer.step()
            losses.append(loss.item())
            rates.append(rate)
    out = {f"network.{name}": value for name, value in [*network.state_dict().items(), *matrices.items()]}
    return out | grads | {"loss": torch.tensor(losses), "lr": torch.tensor(rates)}
