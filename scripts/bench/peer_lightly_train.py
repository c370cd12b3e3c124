"""The other side of `ocelli pretrain --recipe dinov2_cifar`: the same run with lightly-train's DINOv2 on the CPU.

The backbone, the sizes and scales of views, the batch, the number of epochs and the settings of the method and of the optimizer
are those of the recipe; everything else is lightly-train's own: its augmentation, its mask generator, the order of images and
its initial weights. Writes the teacher's backbone as a state dict of DINOv2, which `ocelli probe` reads, and prints images per
second over all epochs, loading and augmentation included. Needs lightly-train (0.18) and Pillow.

    python scripts/bench/peer_lightly_train.py --train 'cifar/train-*.tar' --n-images 10000 --seed 0 --out lightly
    ocelli probe --checkpoint lightly/backbone.pth --heads 4 --train 'cifar/train-*.tar' --test 'cifar/test-*.tar' --image-px 32 --resize-px 32
"""

import argparse
import glob
import shutil
import tarfile
import time
import tomllib
from functools import partial
from pathlib import Path

import lightly_train
import torch
from lightly_train._models.dinov2_vit.dinov2_vit_src.layers import MemEffAttention, NestedTensorBlock
from lightly_train._models.dinov2_vit.dinov2_vit_src.models.vision_transformer import DinoVisionTransformer


def images(shards, n, out):
    """Writes the first `n` images of `shards` to the folder `out`, as they are."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    written = 0
    for shard in sorted(glob.glob(shards)):
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith((".jpg", ".png")) and written < n:
                    (out / f"{Path(shard).stem}-{Path(member.name).name}").write_bytes(tar.extractfile(member).read())
                    written += 1
    if written < n:
        raise SystemExit(f"{shards} has {written} images, fewer than {n}")


def backbone(model):
    """The recipe's backbone, with lightly-train's copy of DINOv2's code."""
    return DinoVisionTransformer(
        img_size=model["image_px"],
        patch_size=model["patch_px"],
        embed_dim=model["width"],
        depth=model["depth"],
        num_heads=model["heads"],
        mlp_ratio=4,
        block_fn=partial(NestedTensorBlock, attn_class=MemEffAttention),
        block_chunks=0,
    )


def views(crops):
    """The recipe's crops as arguments of the transform."""
    first, local = crops
    jitter = {"prob": first["jitter"]["p"], "strength": 1.0} | {
        key: first["jitter"][key] for key in ("brightness", "contrast", "saturation", "hue")
    }
    blur = {"prob": first["blur_p"], "sigmas": tuple(first["blur_sigma"]), "blur_limit": 0}
    solarize = {"prob": first["solarize_p"], "threshold": 0.5}
    scale = lambda crop: {"min_scale": crop["scale"][0], "max_scale": crop["scale"][1]}
    return {
        "image_size": (first["size_px"],) * 2,
        "random_resize": scale(first),
        "random_flip": {"horizontal_prob": first["flip_p"], "vertical_prob": 0.0},
        "color_jitter": jitter,
        "random_gray_scale": first["gray_p"],
        "gaussian_blur": blur,
        "solarize": solarize,
        "global_view_1": {"gaussian_blur": blur, "solarize": solarize},
        "local_view": {
            "num_views": local["count"],
            "view_size": (local["size_px"],) * 2,
            "random_resize": scale(local),
            "gaussian_blur": blur,
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="scripts/recipes/dinov2_cifar.toml")
    parser.add_argument("--train", required=True, help="glob of shards")
    parser.add_argument("--n-images", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    recipe = tomllib.loads(Path(args.recipe).read_text())
    method, optim = recipe["method"], recipe["optim"]
    batch = optim["batch_size"]
    epochs = args.epochs or optim["length"]["epochs"]
    steps_per_epoch = args.n_images // batch
    folder = args.out / "images"
    images(args.train, args.n_images, folder)
    torch.manual_seed(args.seed)
    # The recipe scales its rate by batch / 256, lightly-train by sqrt(batch / 1024).
    lr = optim["lr"] * batch / 256 / (batch / 1024) ** 0.5
    start = time.time()
    lightly_train.pretrain(
        out=args.out / "run",
        data=folder,
        model=backbone(recipe["model"]),
        method="dinov2",
        method_args={
            "hidden_dim": method["head_hidden"],
            "dino_bottleneck_dim": method["head_bottleneck"],
            "ibot_bottleneck_dim": method["head_bottleneck"],
            "output_dim": method["prototypes"],
            "student_freeze_last_layer_steps": method["freeze_last_layer"]["epochs"] * steps_per_epoch,
            "center_method": "sinkhorn_knopp",
            "momentum_start": method["teacher_decay"][0],
            "momentum_end": method["teacher_decay"][1],
            "teacher_temp_start": method["teacher_temp"][0],
            "teacher_temp_end": method["teacher_temp"][1],
            "teacher_temp_warmup_steps": 0,
            "min_lr": optim["min_lr"],
            "warmup_steps": optim["warmup"]["percent"] * epochs * steps_per_epoch // 100,
            "layerwise_decay": 1.0,
            "patch_embed_lr_multiplier": 1.0,
            "weight_decay_end": optim["weight_decay"][1],
        },
        optim_args={"lr": lr, "weight_decay": optim["weight_decay"][0]},
        transform_args=views(recipe["views"]["crops"]),
        epochs=epochs,
        batch_size=batch,
        num_workers=2,
        precision="32-true",
        accelerator="cpu",
        devices=1,
        seed=args.seed,
        overwrite=True,
    )
    seconds = time.time() - start
    exported = torch.load(args.out / "run/exported_models/exported_last.pt", map_location="cpu")
    torch.save(exported, args.out / "backbone.pth")
    images_per_s = steps_per_epoch * batch * epochs / seconds
    print(f"lightly-train, seed {args.seed}: {seconds:.0f} s, {images_per_s:.0f} images/s, {args.out / 'backbone.pth'}")


if __name__ == "__main__":
    main()
