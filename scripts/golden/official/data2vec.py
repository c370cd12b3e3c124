"""data2vec, written out with timm's transformer and PyTorch's AdamW.

Masks are those of networks/src/mask/blocks.rs, with exactly as many patches in each view."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from dinov2_training import masks
from distillation import transformer
from machine import machine, named, rename
from numbers_by_name import N_BATCHES, fill, views

BATCH, N_STEPS, WARMUP, SIZE, PATCH, WIDTH, DEPTH = 16, 12, 4, 32, 4, 24, 3
AVERAGED, BETA, RATIO, DECAY, RAMP = 2, 0.7, 0.6, (0.9, 0.99), 8

NAMES = rename((r"^backbone\.", ""), (r"^regression\.", "regression.linear.linear0."))


class Network(nn.Module):
    """A transformer with a token for masked patches."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = transformer(PATCH, WIDTH, DEPTH)
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))

    def blocks(self, x, masked=None):
        """Outputs of all blocks for the views `x` [B, 3, S, S], of which the patches `masked` [B, N] are hidden."""
        x = self.backbone.patch_embed(x)
        if masked is not None:
            x = torch.where(masked[..., None], self.mask_token, x)
        x = self.backbone._pos_embed(x)
        outputs = []
        for block in self.backbone.blocks:
            x = block(x)
            outputs.append(x)
        return outputs


def data2vec(run: str, rate: float):
    losses = []
    with machine([]):
        teacher, student = Network(), Network()
        head = nn.ModuleDict({"regression": nn.Linear(WIDTH, WIDTH)})
        for network in (teacher, student, head):
            fill(network, NAMES)
        teacher.requires_grad_(False)
        optimizer = torch.optim.AdamW([*student.parameters(), *head.parameters()], weight_decay=0.05)
        for step in range(N_STEPS):
            x = views(run, step % N_BATCHES, BATCH, [(1, SIZE)])[0]
            masked = masks(step, BATCH, 1, SIZE // PATCH, 1.0, (RATIO, RATIO), exact=True)[:, 0]
            # Section 3.3 of the paper: each block's output is normalized, and then they are averaged.
            last = [F.layer_norm(output[:, 1:], (WIDTH,)) for output in teacher.blocks(x)[-AVERAGED:]]
            target = sum(last) / AVERAGED
            features = student.backbone.norm(student.blocks(x, masked)[-1])[:, 1:]
            loss = F.smooth_l1_loss(head["regression"](features[masked]), target[masked], beta=BETA)
            half = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (N_STEPS - WARMUP)))
            optimizer.param_groups[0]["lr"] = rate * step / WARMUP if step < WARMUP else 1e-5 + (rate - 1e-5) * half
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tau = DECAY[0] + (DECAY[1] - DECAY[0]) * min(step / RAMP, 1)
            averaged = dict(student.named_parameters())
            for name, parameter in teacher.named_parameters():
                parameter.mul_(tau).add_(averaged[name].detach(), alpha=1 - tau)
            losses.append(loss.item())
    out = named("teacher", teacher.state_dict(), NAMES) | named("student", student.state_dict(), NAMES)
    return out | named("student", head.state_dict(), NAMES) | {"loss": torch.tensor(losses)}
