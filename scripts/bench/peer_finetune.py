"""The other side of `ocelli finetune`: the same weights, images and number of steps with timm and PyTorch on the CPU.

Reads the settings from the plan of a run of `ocelli finetune`, and the weights from a folder that `ocelli export --format timm` has written.
Model, transforms, mixup, cutmix and random erasing, loss, AdamW with rates by layer and the cosine schedule are timm's, put together as
in its training script; without an average of the weights and without mixed precision, which that script has as options. Images are read
from the same shards, and top-1 is of one center crop of each test image, as `ocelli finetune` takes it. Needs torch, torchvision and timm.

    ocelli export --checkpoint runs/pretrained --format timm --out backbone/
    ocelli finetune --checkpoint runs/pretrained --shards 'cifar/train-*.tar' --val-shards 'cifar/test-*.tar' --workdir runs/f
    python scripts/bench/peer_finetune.py --run runs/f --weights backbone/ --train 'cifar/train-*.tar' --test 'cifar/test-*.tar'

What differs: positions and the class token are not decayed by timm; in timm each image is mixed with the one at the mirrored place of the
batch, and each box of noise is drawn after normalization. Ends with a line of JSON: steps, passes, images_seen, seconds (of the steps),
images_per_s, top1.
"""

import argparse
import json
import pathlib
import time
import tomllib

import timm
import torch
from timm.data import Mixup, create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T

from peer_data import Labeled, batches


# Settings that would change the run of Ocelli, each with what is done here if a recipe has it: the values, besides no value at all.
DONE = {
    "data.balance": [0],
    "data.mix": [],
    "data.validation": [0],
    "data.weights": [],
    "method.loss": ["cross_entropy"],
    "optim.adapter": [],
    "optim.decay_vectors": [False],
    "optim.freeze_backbone": [{unit: 0} for unit in ("steps", "epochs", "samples", "percent")],
    "optim.patch_rate": [1],
    "optim.schedule": ["cosine"],
    "optim.trained_units": [],
    "run.patience": [],
    "views.crops.0.channel_drop_p": [0],
    "views.crops.0.own_statistics": [False],
    "views.crops.0.rotate_p": [0],
}


def value_of(recipe, key):
    """The value of `key` in a recipe; None if it has none."""
    value = recipe
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
        if value is None:
            return None
    return value


def check_settings(recipe):
    """Refuses what is not done here, instead of measuring another run than that of Ocelli."""
    for key, done in DONE.items():
        value = value_of(recipe, key)
        if value is not None and value not in done:
            raise SystemExit(f"{key} = {value} is not supported here")


def training_transform(recipe):
    """The views of a recipe, with timm's transforms."""
    (crop,) = recipe["views"]["crops"]
    jitter = crop.get("jitter", {})
    strengths = tuple(jitter.get(key, 0.0) for key in ("brightness", "contrast", "saturation", "hue"))
    has_jitter = jitter.get("p", 0.0) > 0
    for key in ("gray_p", "blur_p", "solarize_p"):
        if crop.get(key, 0.0) > 0:
            raise SystemExit(f"views.crops.0.{key} is not supported here")
    return create_transform(
        crop["size_px"],
        is_training=True,
        scale=tuple(crop["scale"]),
        hflip=crop.get("flip_p", 0.0),
        color_jitter=strengths if has_jitter else None,
        color_jitter_prob=jitter["p"] if has_jitter else None,
        interpolation=crop.get("interpolation", "bicubic"),
        mean=tuple(recipe["data"]["normalization"]["mean"]),
        std=tuple(recipe["data"]["normalization"]["std"]),
        re_prob=crop.get("erase", {}).get("p", 0.0),
        re_mode="pixel",
    )


def test_transform(recipe):
    """Resize and center crop in the proportion of 256 to 224."""
    size = recipe["views"]["crops"][0]["size_px"]
    constants = recipe["data"]["normalization"]
    steps = [T.Resize(round(size * 256 / 224), T.InterpolationMode.BICUBIC), T.CenterCrop(size), T.ToTensor()]
    return T.Compose([*steps, T.Normalize(constants["mean"], constants["std"])])


def targets_of(method, n_classes):
    """Mixing of batches, or None, and the loss of their targets."""
    smoothing = method.get("smoothing", 0.0)
    if method.get("mixup", 0.0) > 0 or method.get("cutmix", 0.0) > 0:
        mixing = Mixup(
            mixup_alpha=method.get("mixup", 0.0),
            cutmix_alpha=method.get("cutmix", 0.0),
            prob=method.get("mix_probability", 1.0),
            switch_prob=method.get("cutmix_probability", 0.5),
            label_smoothing=smoothing,
            num_classes=n_classes,
        )
        return mixing, SoftTargetCrossEntropy()
    return None, LabelSmoothingCrossEntropy(smoothing) if smoothing else nn.CrossEntropyLoss()


def rate_scale(optim):
    """Factor of the learning rate for the batch."""
    batches_of_256 = optim["batch_size"] / 256
    return {"linear": batches_of_256, "sqrt": batches_of_256**0.5, "fixed": 1.0}[optim["lr_scaling"]]


def optimizer_of(model, optim):
    if optim["algorithm"] != "adamw" or optim.get("clip_norm", 0.0) > 0:
        raise SystemExit("only AdamW without clipping is supported here")
    start, end = optim["weight_decay"]
    if start != end:
        raise SystemExit("optim.weight_decay must be the same at start and end here")
    lr = optim["lr"] * rate_scale(optim)
    # None, as in the script, if all layers have the same rate.
    layer_decay = optim.get("layer_decay")
    betas = tuple(optim["betas"])
    return create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=start, betas=betas, layer_decay=layer_decay)


@torch.no_grad()
def top1(model, test):
    model.eval()
    n_right = 0
    for images, labels in DataLoader(test, batch_size=256):
        n_right += (model(images).argmax(1) == labels).sum().item()
    return 100 * n_right / len(test)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=pathlib.Path, required=True, help="folder of a run of `ocelli finetune`")
    parser.add_argument("--weights", type=pathlib.Path, required=True, help="folder of `ocelli export --format timm`")
    parser.add_argument("--train", required=True, help="labeled shards, a pattern, or a folder of images with a subfolder for each class")
    parser.add_argument("--test", required=True, help="the same to test on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    plan = tomllib.loads((args.run / "plan.toml").read_text())
    recipe, total = plan["recipe"], plan["total_steps"]
    check_settings(recipe)
    optim, method = recipe["optim"], recipe["method"]
    torch.manual_seed(recipe["seed"])
    torch.set_num_threads(args.threads)
    train, test = Labeled(args.train, training_transform(recipe)), Labeled(args.test, test_transform(recipe))
    n_classes = max(train.labels) + 1
    drop_path = recipe["model"].get("drop_path", 0.0)
    model = timm.create_model(f"local-dir:{args.weights}", pretrained=True, num_classes=n_classes, drop_path_rate=drop_path)
    mixing, loss_of = targets_of(method, n_classes)
    optimizer = optimizer_of(model, optim)
    scheduler = CosineLRScheduler(
        optimizer,
        # The cosine begins after the warm-up, as in Ocelli.
        t_initial=max(1, total - plan["warmup_steps"]),
        lr_min=optim["min_lr"],
        warmup_t=plan["warmup_steps"],
        warmup_prefix=True,
        warmup_lr_init=optim.get("start_lr", 0.0) * rate_scale(optim),
        t_in_epochs=False,
    )
    source = batches(train, optim["batch_size"], args.workers)
    model.train()
    start = time.perf_counter()
    for step in range(total):
        images, labels = next(source)
        targets = labels
        if mixing is not None:
            images, targets = mixing(images, labels)
        scheduler.step_update(step)
        loss = loss_of(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            elapsed = time.perf_counter() - start
            print(f"step {step + 1} of {total} loss {loss.item():.4f} {(step + 1) * len(images) / elapsed:.0f} images/s", flush=True)
    seconds = time.perf_counter() - start
    n_seen = total * optim["batch_size"]
    speed = {"steps": total, "passes": n_seen / len(train), "images_seen": n_seen, "seconds": seconds, "images_per_s": n_seen / seconds}
    print(json.dumps(speed | {"top1": top1(model, test)}))


if __name__ == "__main__":
    main()
