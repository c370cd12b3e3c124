"""The other side of `ocelli pretrain` for small recipes: the same recipe in PyTorch on the CPU.

Reads a recipe of this repository, trains with the usual tools (PIL and torchvision transforms in a DataLoader,
scaled-dot-product attention, torchvision's ResNets, lightly's losses, PyTorch's optimizers) on the images of some
shards, and prints the k-NN accuracy of the backbone beside that of its random start. Needs torch and torchvision, and
lightly for SimCLR, SwAV, BYOL, Barlow Twins and VICReg.

    python scripts/bench/peer_train.py --recipe scripts/recipes/dino_cifar.toml \
        --train 'cifar/train-*.tar' --test 'cifar/test-*.tar' --minutes 20

With --minutes, steps are timed first for a fiftieth of the time, and the schedules are laid over the number of steps that then
fits (`ocelli` times them in its own way: docs/hours.md); the minutes are those of the steps alone, without the start, the timing
and the scores. --epochs and --steps set
the length; with none of them, the length is the recipe's. --set changes values of the recipe like that of `ocelli pretrain`. With
--bench, steps on one batch of noise are timed, beside `ocelli bench step`. It knows the parts of a recipe that the small recipes use;
what else a recipe sets is an error. With --out, a transformer is written under timm's names, which `ocelli probe` scores
like a network of its own:

    ocelli probe --checkpoint dino.pth --heads 4 --resize-px 32 --train 'cifar/train-*.tar' --test 'cifar/test-*.tar'
"""

import argparse
import copy
import json
import math
import statistics
import time
import tomllib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T

from peer_data import MEAN, STD, MultiCrop, Shards, batches
from peer_methods import METHODS
from peer_networks import timm_names

KNOWN = {
    "model": "arch image_px patch_px width depth heads init_std mlp_ratio stem class_token positions initialization token_std",
    "data": "",
    "optim": "algorithm batch_size length lr lr_scaling min_lr warmup weight_decay decay_vectors betas momentum clip_norm",
}


class Clock:
    """Durations and schedules of a recipe in steps."""

    def __init__(self, total, n_images, batch):
        self.total, self.n_images, self.batch = total, n_images, batch

    def steps_of(self, duration):
        (unit, value), = duration.items()
        in_steps = {
            "steps": lambda: value,
            "epochs": lambda: value * self.n_images / self.batch,
            "samples": lambda: value / self.batch,
            "percent": lambda: value * self.total / 100,
        }
        return round(in_steps[unit]())

    def cosine(self, peak, end, warmup=0):
        def at(step):
            if step < warmup:
                return peak * step / max(warmup - 1, 1)
            done = min((step - warmup) / max(self.total - warmup, 1), 1)
            return end + 0.5 * (peak - end) * (1 + math.cos(math.pi * done))

        return at


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
    """A method and its optimizer."""

    def __init__(self, recipe, clock, layout):
        optim = recipe["optim"]
        self.method, self.clip_norm = METHODS[recipe["method"]["name"]](recipe, clock), optim.get("clip_norm")
        self.method.trained.to(memory_format=layout)
        params = list(self.method.trained.parameters())
        groups = [{"params": params}]
        if not optim.get("decay_vectors", False):
            # Matrices first: theirs is the weight decay.
            matrices = [p for p in params if p.dim() > 1]
            vectors = [p for p in params if p.dim() <= 1]
            groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        algorithm = optim.get("algorithm", "adamw")
        if algorithm not in ("adamw", "sgd"):
            raise SystemExit(f"optim.algorithm {algorithm} is not supported here")
        if algorithm == "adamw":
            self.optimizer = torch.optim.AdamW(groups, betas=tuple(optim.get("betas", (0.9, 0.999))))
            self.clip_norm = 3.0 if self.clip_norm is None else self.clip_norm
        else:
            self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=optim.get("momentum", 0.9))
        scale = {"linear": clock.batch / 256, "sqrt": (clock.batch / 256) ** 0.5, "fixed": 1.0}[optim.get("lr_scaling", "linear")]
        self.lr = clock.cosine(optim["lr"] * scale, optim.get("min_lr", 1e-6), clock.steps_of(optim["warmup"]))
        self.wd = clock.cosine(*optim.get("weight_decay", (0.04, 0.4) if algorithm == "adamw" else (1e-4, 1e-4)))

    def step(self, step, groups):
        self.optimizer.param_groups[0]["weight_decay"] = self.wd(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        loss, embeddings = self.method.loss(step, groups)
        self.optimizer.zero_grad()
        loss.backward()
        self.method.before_update(step)
        if self.clip_norm:
            for p in self.method.trained.parameters():
                if p.grad is not None:
                    nn.utils.clip_grad_norm_([p], self.clip_norm)
        self.optimizer.step()
        self.method.after(step)
        return loss.item(), embeddings.detach().std(0).mean().item()


def with_setting(recipe, entry):
    """Sets a value of a recipe: `model.width=192`, or `views.crops.0.size_px=64` in a list."""
    path, _, text = entry.partition("=")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = path.split(".")
    table = recipe
    for section in sections:
        table = table[int(section)] if isinstance(table, list) else table.setdefault(section, {})
    table[int(last) if isinstance(table, list) else last] = value


def steps_within(minutes, run, source, warm=10, least=3):
    """Number of steps that fit into `minutes`, by those of a fiftieth of the time after some that warm up.

    The loader has batches in advance, which the first steps use up.
    """
    budget_s, n = 60 * minutes / 50, 0
    start = time.perf_counter()
    while n < warm and (n == 0 or time.perf_counter() - start < budget_s):
        run.step(n, next(source))
        n += 1
    first, start = n, time.perf_counter()
    while n - first < least or time.perf_counter() - start < budget_s:
        run.step(n, next(source))
        n += 1
    return max(1, int(60 * minutes * (n - first) / (time.perf_counter() - start)))


def bench(recipe, batch, repeats, layout):
    """Milliseconds of steps on noise."""
    groups = {}
    for crop in recipe["views"]["crops"]:
        groups[crop["size_px"]] = groups.get(crop["size_px"], 0) + crop["count"]
    noise = [torch.randn(batch, count, 3, size, size) for size, count in groups.items()]
    run, times = Run(recipe, Clock(1000, 10_000, batch), layout), []
    for step in range(repeats + 1):
        start = time.perf_counter()
        run.step(step, noise)
        times.append(1e3 * (time.perf_counter() - start))
    # The first step warms caches and pools.
    print(json.dumps({"median_ms": statistics.median(times[1:]), "times_ms": times[1:]}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes a value of the recipe; can be repeated")
    parser.add_argument("--train")
    parser.add_argument("--test")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", help="file for the weights of the scored backbone, a transformer")
    parser.add_argument("--probe-every", type=int, default=0, help="steps between k-NN scores, not counted as time")
    parser.add_argument("--channels-last", action="store_true", help="PyTorch's faster layout for convolutions")
    parser.add_argument("--bench", type=int, help="time so many steps on noise, and train nothing")
    args = parser.parse_args()
    with open(args.recipe, "rb") as file:
        recipe = tomllib.load(file)
    for entry in args.set:
        with_setting(recipe, entry)
    known = KNOWN | {"method": METHODS[recipe["method"]["name"]].KEYS}
    for section, keys in known.items():
        if unknown := set(recipe.get(section, {})) - set(keys.split()):
            raise SystemExit(f"{args.recipe}: {section}.{unknown.pop()} is not supported here")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    batch, size = recipe["optim"]["batch_size"], recipe["model"]["image_px"]
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    if args.bench:
        return bench(recipe, batch, args.bench, layout)
    if not (args.train and args.test):
        parser.error("--train and --test are needed, or --bench")
    train, test = (Shards(pattern, MultiCrop(recipe["views"]["crops"])) for pattern in (args.train, args.test))
    length = {"epochs": args.epochs} if args.epochs else recipe["optim"]["length"]
    total = args.steps or Clock(None, len(train), batch).steps_of(length)
    source = batches(train, batch, args.workers)
    if args.out and recipe["model"]["arch"] != "vit":
        parser.error("--out writes transformers only")
    if args.minutes:
        total = steps_within(args.minutes, Run(recipe, Clock(1_000_000, len(train), batch), layout), source)
    run = Run(recipe, Clock(total, len(train), batch), layout)
    random_knn = knn(run.method.scored, train, test, size)
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
            print(f"step {step + 1} k-NN {knn(run.method.scored, train, test, size):.1f}", flush=True)
            start = time.perf_counter()
    seconds += time.perf_counter() - start
    if args.out:
        torch.save(timm_names(run.method.scored), args.out)
    score = knn(run.method.scored, train, test, size)
    speed = {"steps": total, "images_seen": total * batch, "seconds": seconds, "images_per_s": total * batch / seconds}
    print(json.dumps(speed | {"knn": score, "random_knn": random_knn}))


if __name__ == "__main__":
    main()
