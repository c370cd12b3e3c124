"""The other side of `ocelli bench step --device cuda`: the same DINO step in PyTorch.

timm's vision transformer with scaled-dot-product attention, DINO's head with a weight-normed last layer, a
centered and sharpened teacher, bf16 autocast (residuals stay f32, where ours are bf16), fused AdamW, gradients
clipped by parameter, a moving-average teacher in one foreach pass; two views of 224 and eight of 96 an image as bytes
that are normalized on the device, to which they are copied within the step. Needs torch and timm.

    python scripts/bench/peer_dino.py --model vit_small_patch16_224 --batch 64 [--compile] [--device cpu]

Ends with one line of JSON: images_per_s, step_ms, phases_ms, memory_bytes, matrix_peak_tflops.
"""

import argparse
import copy
import json
import statistics
import time

import timm
import torch
import torch.nn.functional as F
from torch import nn

GLOBAL_PX, LOCAL_PX, N_LOCAL = 224, 96, 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Head(nn.Module):
    """DINO's: three layers with GELU, and prototypes of length one, in f32."""

    def __init__(self, d, prototypes, hidden=2048, bottleneck=256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.prototypes = nn.Parameter(torch.empty(prototypes, bottleneck).uniform_(-(bottleneck**-0.5), bottleneck**-0.5))

    def forward(self, x):
        x = F.normalize(self.mlp(x.float()), dim=-1)
        return x @ F.normalize(self.prototypes, dim=-1).T


class Network(nn.Module):
    """Backbone in bf16 where asked for, head in f32."""

    def __init__(self, args):
        super().__init__()
        drop_path = 0.0 if args.no_drop_path else 0.1
        self.backbone = timm.create_model(args.model, num_classes=0, dynamic_img_size=True, drop_path_rate=drop_path)
        self.head = Head(self.backbone.num_features, args.prototypes)
        self.bf16, self.kind = args.dtype == "bf16", args.device.split(":")[0]

    def forward(self, groups):
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.bf16):
            tokens = [self.backbone(views) for views in groups]
        return [self.head(x) for x in tokens]


class Step:
    """One training step, by phase."""

    def __init__(self, args):
        self.args, self.device = args, torch.device(args.device)
        torch.manual_seed(0)
        self.student = Network(args).to(self.device).train()
        # A teacher sees every path.
        self.teacher = copy.deepcopy(self.student)
        for module in self.teacher.modules():
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
        self.teacher.requires_grad_(False)
        decay = [p for p in self.student.parameters() if p.ndim > 1]
        rest = [p for p in self.student.parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.04}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=self.device.type == "cuda")
        self.center = torch.zeros(args.prototypes, device=self.device)
        self.scale = torch.tensor(STD, device=self.device).mul(255).reciprocal().view(1, 3, 1, 1)
        self.shift = (torch.tensor(MEAN) / torch.tensor(STD)).to(self.device).view(1, 3, 1, 1)
        self.run_student, self.run_teacher, self.run_loss = self.student, self.teacher, self.loss
        if args.compile:
            self.run_student = torch.compile(self.student)
            self.run_teacher = torch.compile(self.teacher)
            self.run_loss = torch.compile(self.loss)
        sizes = [(2, GLOBAL_PX), (N_LOCAL, LOCAL_PX)]
        pin = self.device.type == "cuda"
        self.bytes = [torch.randint(0, 256, (n * args.batch, 3, px, px), dtype=torch.uint8) for n, px in sizes]
        self.bytes = [b.pin_memory() if pin else b for b in self.bytes]

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def loss(self, student, targets):
        """Every student view against every other teacher view."""
        total, n_pairs = 0.0, 0
        logs = [F.log_softmax(group / 0.1, -1).view(-1, self.args.batch, group.shape[-1]) for group in student]
        for v, target in enumerate(targets):
            for group, log in enumerate(logs):
                for u in range(len(log)):
                    if group == 0 and u == v:
                        continue
                    total = total - (target * log[u]).sum(-1).mean()
                    n_pairs += 1
        return total / n_pairs

    def run(self, laps=None):
        def lap(name):
            if laps is not None:
                self.wait()
                laps.setdefault(name, []).append(time.perf_counter())

        lap("start")
        views = [b.to(self.device, non_blocking=True).float() * self.scale - self.shift for b in self.bytes]
        lap("input")
        with torch.no_grad():
            logits = self.run_teacher(views[:1])[0]
            targets = F.softmax((logits - self.center) / 0.04, -1).view(2, self.args.batch, -1)
        lap("teacher")
        student = self.run_student(views)
        loss = self.run_loss(student, targets)
        lap("forward and loss")
        loss.backward()
        lap("backward")
        # By parameter, as DINO clips.
        grads = [p.grad for p in self.student.parameters()]
        norms = torch._foreach_norm(grads)
        torch._foreach_add_(norms, 1e-6)
        torch._foreach_reciprocal_(norms)
        torch._foreach_mul_(norms, 3.0)
        torch._foreach_clamp_max_(norms, 1.0)
        torch._foreach_mul_(grads, norms)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), 1 - 0.996)
            self.center.lerp_(logits.mean(0), 0.1)
        value = loss.item()
        lap("update")
        return value


def matrix_peak(device, dtype, n):
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = float("inf")
    for _ in range(6):
        wait()
        start = time.perf_counter()
        for _ in range(4):
            c = a @ b
        wait()
        best = min(best, (time.perf_counter() - start) / 4)
        del c
    return 2 * n**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prototypes", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-drop-path", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="let f32 products round their factors")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    step = Step(args)
    for _ in range(3):
        step.run()
    laps = {}
    for _ in range(args.repeats):
        step.run(laps)
    names = list(laps)
    phases = {
        name: 1e3 * statistics.median(b - a for a, b in zip(laps[before], laps[name]))
        for before, name in zip(names, names[1:])
    }
    step.run()
    step.wait()
    start = time.perf_counter()
    for _ in range(args.repeats):
        loss = step.run()
    step.wait()
    step_ms = 1e3 * (time.perf_counter() - start) / args.repeats
    rate = 1e3 * args.batch / step_ms
    on_gpu = step.device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    # What the allocator holds, as for ours; before the large products.
    memory = torch.cuda.max_memory_reserved() if on_gpu else None
    peak = matrix_peak(step.device, dtype, 8192 if on_gpu else 1024)
    how = "compiled" if args.compile else "eager"
    print(f"{args.model}, batch {args.batch}, {args.dtype}, {how}, torch {torch.__version__}, {name}: loss {loss:.4f}")
    for phase, ms in phases.items():
        print(f"{phase:<18} {ms:9.1f} ms")
    print(f"{'step':<18} {step_ms:9.1f} ms  {rate:.2f} images/s")
    print(json.dumps({
        "images_per_s": rate,
        "step_ms": step_ms,
        "phases_ms": phases,
        "memory_bytes": memory,
        "matrix_peak_tflops": peak / 1e12,
        "torch": torch.__version__,
        "device": name,
    }))


if __name__ == "__main__":
    main()
