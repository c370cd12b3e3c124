"""The other side of `ocelli bench step` for a DINOv2 step: timm's vision transformer with registers in PyTorch, on the CPU in f32.

Two views of 224 px of which half are masked in 30 % of their patches, eight of 98; a head of DINO's for class tokens and another one for
masked patches, both with weight-normalized prototypes; Sinkhorn and Knopp; KoLeo; gradients clipped by module; AdamW; a moving
average of all of it. Needs torch and timm.

    python scripts/bench/peer_dinov2.py --batch 4 --prototypes 16384 [--threads 2] [--repeats 5]
    ocelli bench step --recipe scripts/bench/dinov2_vits14.toml --batch 4

Prints the median time of a step and the peak of memory.
"""

import argparse
import copy
import resource
import statistics
import time

import timm
import torch
import torch.nn.functional as F
from torch import nn

from peer_dino import GLOBAL_PX, N_LOCAL, Head

LOCAL_PX = 98


class Network(nn.Module):
    """Backbone with a mask token, and both heads."""

    def __init__(self, prototypes: int) -> None:
        super().__init__()
        self.backbone = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=0, img_size=GLOBAL_PX, dynamic_img_size=True)
        d = self.backbone.embed_dim
        self.mask_token = nn.Parameter(torch.zeros(1, d))
        self.head, self.patch_head = Head(d, prototypes), Head(d, prototypes)

    def tokens(self, views, masks=None):
        net = self.backbone
        x = net.patch_embed(views)
        if masks is not None:
            shape = x.shape
            x = torch.where(masks.view(shape[0], -1, 1), self.mask_token, x.flatten(1, -2)).view(shape)
        x = net._pos_embed(x)
        for block in net.blocks:
            x = block(x)
        x = net.norm(x)
        return x[:, 0], x[:, net.num_prefix_tokens:]


def sinkhorn(scores, temperature=0.07):
    q = torch.exp((scores - scores.max()) / temperature).t()
    k, b = q.shape
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / k
        q = q / q.sum(0, keepdim=True) / b
    return (q * b).t()


def koleo(x):
    x = F.normalize(x, dim=-1)
    dots = (x @ x.t()).detach().fill_diagonal_(-1)
    return -torch.log((x - x[dots.argmax(1)]).norm(dim=-1) + 1e-8).mean()


class Step:
    def __init__(self, args) -> None:
        torch.manual_seed(0)
        self.batch = args.batch
        self.student = Network(args.prototypes).train()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-4, foreach=True)
        self.views = [torch.randn(n * args.batch, 3, px, px) for n, px in ((2, GLOBAL_PX), (N_LOCAL, LOCAL_PX))]
        n = (GLOBAL_PX // 14) ** 2
        self.masks = torch.zeros(2 * args.batch, n, dtype=torch.bool)
        for view in range(args.batch):
            self.masks[view, torch.randperm(n)[: int(0.3 * n)]] = True

    def loss(self):
        with torch.no_grad():
            tokens, patches = self.teacher.tokens(self.views[0])
            targets = sinkhorn(self.teacher.head(tokens)).chunk(2)
            patch_targets = sinkhorn(self.teacher.patch_head(patches[self.masks]))
        tokens, patches = self.student.tokens(self.views[0], self.masks)
        local, _ = self.student.tokens(self.views[1])
        log = lambda scores: F.log_softmax(scores / 0.1, -1)
        seen, smaller = log(self.student.head(tokens)).chunk(2), log(self.student.head(local)).chunk(N_LOCAL)
        pairs = [(targets[v], seen[1 - v]) for v in range(2)] + [(target, view) for target in targets for view in smaller]
        loss = -sum((target * view).sum(-1).mean() for target, view in pairs) / len(pairs)
        weights = (1 / self.masks.sum(-1).clamp(min=1)).unsqueeze(-1).expand_as(self.masks)[self.masks]
        of_patches = -(patch_targets * log(self.student.patch_head(patches[self.masks]))).sum(-1)
        return loss + (of_patches * weights).sum() / len(self.masks) + 0.1 * sum(koleo(part) for part in tokens.chunk(2))

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        for module in (self.student.backbone, self.student.head, self.student.patch_head):
            nn.utils.clip_grad_norm_(module.parameters(), 3.0)
        self.optimizer.step()
        with torch.no_grad():
            mine, averages = list(self.student.parameters()), list(self.teacher.parameters())
            torch._foreach_mul_(averages, 0.994)
            torch._foreach_add_(averages, mine, alpha=0.006)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prototypes", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step, times = Step(args), []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - start)
    print(f"{statistics.median(times[1:]) * 1e3:.0f} ms a step of {args.batch} images, {min(times[1:]) * 1e3:.0f} at best")
    # In KiB on Linux. Part of it is PyTorch itself.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak {peak * 1024 / 1e6:.0f} MB, of which {loaded * 1024 / 1e6:.0f} before the network was made")


if __name__ == "__main__":
    main()
