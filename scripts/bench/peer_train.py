"""The other side of `ocelli pretrain` for small recipes: the same recipe in PyTorch on the CPU.

Reads a recipe of this repository, trains DINO with the usual tools (PIL and torchvision transforms in a
DataLoader, scaled-dot-product attention, AdamW) on the images of some shards, and prints the k-NN
accuracy of the teacher beside that of its random start. Needs torch and torchvision.

    python scripts/bench/peer_train.py --recipe scripts/recipes/dino_cifar.toml \
        --train 'cifar/train-*.tar' --test 'cifar/test-*.tar' --minutes 20

With --minutes, a few steps are timed first, and the schedules are laid over the number of steps that
then fits; with neither --minutes nor --steps, the length is the recipe's. It knows the parts of a recipe
that the small recipes use; what else a recipe sets is an error.
"""

import argparse
import copy
import glob
import io
import json
import math
import tarfile
import time
import tomllib

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
KNOWN = {
    "model": "arch image_px patch_px width depth heads init_std mlp_ratio",
    "method": "name prototypes head_hidden head_bottleneck head_init_std student_temp centering center_decay koleo_weight",
    "optim": "batch_size length lr min_lr warmup weight_decay betas clip_norm clip freeze_last_layer",
    "teacher": "decay temp temp_warmup",
}


class Shards(Dataset):
    """All labelled images of some shards, held in memory as the bytes they are."""

    def __init__(self, pattern, transform):
        self.images, self.labels, self.transform = [], [], transform
        for path in sorted(glob.glob(pattern)):
            parts = {}
            with tarfile.open(path) as tar:
                for member in tar:
                    key, _, extension = member.name.partition(".")
                    parts.setdefault(key, {})[extension] = tar.extractfile(member).read()
            for sample in parts.values():
                self.labels.append(int(sample.pop("cls")))
                self.images.append(next(iter(sample.values())))
        if not self.images:
            raise SystemExit(f"no images in {pattern}")

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(Image.open(io.BytesIO(self.images[i])).convert("RGB"))


class MultiCrop:
    """The views of a recipe, one transform per view, grouped by size."""

    def __init__(self, crops):
        self.groups = {}
        for crop in crops:
            j = crop.get("jitter", {})
            strengths = [j.get(key, 0.0) for key in ("brightness", "contrast", "saturation", "hue")]
            transform = T.Compose([
                T.RandomResizedCrop(crop["size_px"], scale=tuple(crop["scale"]), interpolation=T.InterpolationMode.BICUBIC),
                T.RandomHorizontalFlip(crop.get("flip_p", 0.0)),
                T.RandomApply([T.ColorJitter(*strengths)], p=j.get("p", 0.0)),
                T.RandomGrayscale(crop.get("gray_p", 0.0)),
                T.RandomApply([T.GaussianBlur(9, tuple(crop.get("blur_sigma", (0.1, 2.0))))], p=crop.get("blur_p", 0.0)),
                T.RandomSolarize(128, crop.get("solarize_p", 0.0)),
                T.ToTensor(),
                T.Normalize(MEAN, STD),
            ])
            self.groups.setdefault(crop["size_px"], []).extend([transform] * crop["count"])

    def __call__(self, image):
        return [torch.stack([view(image) for view in views]) for views in self.groups.values()]


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


class Head(nn.Module):
    def __init__(self, d, m):
        super().__init__()
        h, z = m.get("head_hidden", 2048), m.get("head_bottleneck", 256)
        self.mlp = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, z))
        init_linears(self.mlp, m.get("head_init_std", 0.02))
        self.prototypes = nn.Parameter(torch.empty(m["prototypes"], z).uniform_(-(z**-0.5), z**-0.5))

    def forward(self, x):
        return F.normalize(self.mlp(x), dim=-1) @ F.normalize(self.prototypes, dim=-1).T


def init_linears(module, std):
    for linear in (m for m in module.modules() if isinstance(m, nn.Linear)):
        nn.init.trunc_normal_(linear.weight, std=std)
        nn.init.zeros_(linear.bias)


def targets(logits, center, temp, centering):
    """Teacher probabilities of `logits` [V, B, K]."""
    if centering == "mean":
        return ((logits - center) / temp).softmax(-1)
    v, b, k = logits.shape
    q = ((logits - logits.max()) / temp).exp().clamp_min(1e-30).reshape(v * b, k)
    for _ in range(3):
        q = q / (q.sum(0) * (k / (v * b)))
        q = q / q.sum(1, keepdim=True)
    return q.reshape(v, b, k)


def koleo(x):
    """Mean negative logarithm of the distance to the nearest neighbor, `x` [B, D]."""
    x = F.normalize(x, dim=-1)
    with torch.no_grad():
        nearest = (x @ x.T).fill_diagonal_(-1).argmax(1)
    return -(F.pairwise_distance(x, x[nearest], eps=1e-8) + 1e-8).log().mean()


def schedule(start, peak, end, warmup, total):
    def at(step):
        if step < warmup:
            return start + (peak - start) * step / max(warmup - 1, 1)
        done = min((step - warmup) / max(total - warmup, 1), 1)
        return end + 0.5 * (peak - end) * (1 + math.cos(math.pi * done))

    return at


def steps_of(duration, n, batch, total):
    (unit, value), = duration.items()
    return round({"steps": value, "epochs": value * n / batch, "samples": value / batch, "percent": value * (total or 0) / 100}[unit])


@torch.no_grad()
def features(model, data, size):
    transform = T.Compose([T.Resize(size, T.InterpolationMode.BICUBIC), T.CenterCrop(size), T.ToTensor(), T.Normalize(MEAN, STD)])
    plain = copy.copy(data)
    plain.transform = transform
    model.eval()
    out = [model(batch) for batch in DataLoader(plain, batch_size=256)]
    model.train()
    return F.normalize(torch.cat(out), dim=-1), torch.tensor(data.labels)


def knn(model, train, test, size, k=20, temp=0.07):
    (x, y), (qx, qy) = features(model, train, size), features(model, test, size)
    sims, ids = (qx @ x.T).topk(k)
    votes = F.one_hot(y[ids], int(y.max()) + 1) * (sims / temp).exp().unsqueeze(-1)
    return 100 * (votes.sum(1).argmax(1) == qy).float().mean().item()


class Run:
    """Student, teacher, optimizer and center of one run."""

    def __init__(self, recipe, total, n):
        self.r, self.total = recipe, total
        model, method, optim, teacher = recipe["model"], recipe["method"], recipe["optim"], recipe["teacher"]
        batch = optim["batch_size"]
        self.student = nn.ModuleList([ViT(model), Head(model["width"], method)])
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.center = torch.zeros(method["prototypes"])
        decayed = [p for p in self.student.parameters() if p.squeeze().dim() > 1]
        rest = [p for p in self.student.parameters() if p.squeeze().dim() <= 1]
        betas = tuple(optim.get("betas", (0.9, 0.999)))
        self.optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], betas=betas)
        cosine = lambda ends: schedule(ends[0], ends[0], ends[1], 0, total)
        warmup = steps_of(optim["warmup"], n, batch, total)
        self.lr = schedule(0, optim["lr"] * batch / 256, optim.get("min_lr", 1e-6), warmup, total)
        self.wd = cosine(optim.get("weight_decay", (0.04, 0.4)))
        self.decay = cosine(teacher["decay"])
        self.temp_ramp = steps_of(teacher["temp_warmup"], n, batch, total)
        self.frozen = steps_of(optim.get("freeze_last_layer", {"epochs": 1}), n, batch, total)

    def temp(self, step):
        low, high = self.r["teacher"]["temp"]
        return high if step >= self.temp_ramp else low + (high - low) * step / self.temp_ramp

    def step(self, step, groups):
        method, optim = self.r["method"], self.r["optim"]
        self.optimizer.param_groups[0]["weight_decay"] = self.wd(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        # [B, V, C, H, W] to [V·B, C, H, W], a group at a time.
        flat = [g.transpose(0, 1).flatten(0, 1) for g in groups]
        views = [g.shape[1] for g in groups]
        with torch.no_grad():
            logits = self.teacher[1](self.teacher[0](flat[0])).unflatten(0, (views[0], -1))
            probs = targets(logits, self.center, self.temp(step), method.get("centering", "mean"))
        embeddings = [self.student[0](x) for x in flat]
        log_probs = torch.cat([
            F.log_softmax(self.student[1](e) / method.get("student_temp", 0.1), -1).unflatten(0, (v, -1))
            for e, v in zip(embeddings, views)
        ])
        pairs = [(i, j) for i in range(len(probs)) for j in range(len(log_probs)) if i != j]
        loss = -sum((probs[i] * log_probs[j]).sum(-1).mean() for i, j in pairs) / len(pairs)
        total = loss
        if weight := method.get("koleo_weight", 0.0):
            total = loss + weight * sum(koleo(view) for view in embeddings[0].unflatten(0, (views[0], -1)))
        self.optimizer.zero_grad()
        total.backward()
        if step < self.frozen:
            self.student[1].prototypes.grad = None
        for p in self.student.parameters():
            if p.grad is not None and optim.get("clip_norm", 3.0) > 0:
                nn.utils.clip_grad_norm_([p], optim.get("clip_norm", 3.0))
        self.optimizer.step()
        with torch.no_grad():
            d, c = self.decay(step), method.get("center_decay", 0.9)
            for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                t.mul_(d).add_(s, alpha=1 - d)
            self.center = self.center * c + logits.mean((0, 1)) * (1 - c)
        return loss.item(), embeddings[0].detach().std(0).mean().item()


def batches(data, batch, workers):
    while True:
        yield from DataLoader(data, batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--probe-every", type=int, default=0, help="steps between k-NN scores, not counted as time")
    args = parser.parse_args()
    with open(args.recipe, "rb") as file:
        recipe = tomllib.load(file)
    for section, keys in KNOWN.items():
        if unknown := set(recipe[section]) - set(keys.split()):
            raise SystemExit(f"{args.recipe}: {section}.{unknown.pop()} is not supported here")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    train, test = (Shards(pattern, MultiCrop(recipe["views"]["crops"])) for pattern in (args.train, args.test))
    batch, size = recipe["optim"]["batch_size"], recipe["model"]["image_px"]
    total = args.steps or steps_of(recipe["optim"]["length"], len(train), batch, None)
    source = batches(train, batch, args.workers)
    if args.minutes:
        trial, warm, timed = Run(recipe, 1000, len(train)), 10, 40
        for i in range(warm + timed):
            if i == warm:
                start = time.perf_counter()
            trial.step(i, next(source))
        total = int(60 * args.minutes * timed / (time.perf_counter() - start))
    run = Run(recipe, total, len(train))
    random_knn = knn(run.teacher[0], train, test, size)
    print(f"{total} steps of {batch}; random k-NN {random_knn:.1f}", flush=True)
    seconds, start = 0.0, time.perf_counter()
    for step in range(total):
        loss, std = run.step(step, next(source))
        if (step + 1) % 50 == 0:
            elapsed = seconds + time.perf_counter() - start
            rate = (step + 1) * batch / elapsed
            print(f"step {step + 1} loss {loss:.4f} feature_std {std:.3f} {rate:.0f} images/s {elapsed:.0f} s", flush=True)
        if args.probe_every and (step + 1) % args.probe_every == 0:
            seconds += time.perf_counter() - start
            print(f"step {step + 1} k-NN {knn(run.teacher[0], train, test, size):.1f}", flush=True)
            start = time.perf_counter()
    seconds += time.perf_counter() - start
    score = knn(run.teacher[0], train, test, size)
    print(json.dumps({"steps": total, "seconds": seconds, "images_per_s": total * batch / seconds, "knn": score, "random_knn": random_knn}))


if __name__ == "__main__":
    main()
