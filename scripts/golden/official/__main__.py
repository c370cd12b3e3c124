"""Makes tests/golden/official/: what the official training code of eleven methods computes of small networks,
on a CPU, in f64.

Needs torch, torchvision, timm, transformers, safetensors and fvcore, and the official repositories as they are. Run at the root of the repository:

    python scripts/golden/official --swav DIR --vissl DIR --classy DIR --apex DIR --lejepa DIR --dino DIR --dinov2 DIR \
        --dinov3 DIR --moco DIR --barlowtwins DIR --vicreg DIR --mae DIR --ijepa DIR

`--classy` is facebookresearch/ClassyVision, `--apex` a commit of NVIDIA/apex from before May 2025, when LARC was removed. Runs that
`--only` leaves out need no repository. Nothing of these repositories is
kept here but the numbers that they compute: losses and rates of every step, weights at the end.
"""

import os
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.filterwarnings("ignore")

import argparse
import tempfile
from pathlib import Path

import torch
import torchvision  # noqa: F401, before modules are stood in for
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from barlowtwins import barlowtwins
from byol import byol
from classification import classification
from data2vec import data2vec
from dino import DINO_RESNET, DINO_VIT, balanced, dino
from dinov2_training import dinov2
from dinov3_training import dinov3
from distillation import distillation
from ijepa import ijepa
from lejepa import lejepa
from mae import mae
from mocov3 import moco
from numbers_by_name import check_chacha
from segmentation import segmentation
from simclr import simclr
from swav import swav
from vicreg import vicreg

OUT = Path("tests/golden/official")


def runs(paths, folder: str) -> dict:
    small, large = [(2, 32), (3, 16)], [(2, 64), (2, 32)]
    vit = lambda name, norm, more=(), **options: dino(paths, name, "golden_vit", norm, [*DINO_VIT, *more], small, **options)
    return {
        "swav": lambda: swav(paths, "swav", 0),
        "swav_queue": lambda: swav(paths, "swav_queue", 32),
        "simclr": lambda: simclr(paths),
        "lejepa_all": lambda: lejepa(paths, "lejepa_all", "all"),
        "lejepa_global": lambda: lejepa(paths, "lejepa_global", "global"),
        "dino": lambda: vit("dino_official", False),
        "dino_norm": lambda: vit("dino_official_norm", True),
        # The views of this name are far from the ties of a rectifier or a maximum, which rounding would decide.
        "dino_resnet": lambda: dino(paths, "dino_resnet_c", "golden_resnet", True, DINO_RESNET, large),
        # Written out: the code that is known has other data paths.
        "distillation_squared": lambda: distillation("distillation", "squared"),
        "distillation_cosine": lambda: distillation("distillation", "cosine"),
        "moco_vit": lambda: moco(paths, "moco_vit", "adamw", 1, 0.2),
        # The views of this name are as far from ties.
        "moco_resnet": lambda: moco(paths, "moco_resnet_e", "lars", 1, 1.0),
        # So are those of these names.
        "barlow_twins": lambda: barlowtwins(paths, "barlow_twins_f", 14, 0.1, 0.02),
        "vicreg": lambda: vicreg(paths, "vicreg_g", 14, 0.1, 0.02),
        # Written out: the authors' code is in JAX.
        "byol": lambda: byol("byol_c", 12, 0.1),
        # Written out: the authors' code is not among the repositories.
        "data2vec": lambda: data2vec("data2vec", 5e-3),
        # Written out: the authors' scripts are tied to their data paths. The second trains the last block and the norm alone, the
        # third adapters of rank 2.
        "classification": lambda: classification("classification", 4),
        "classification_last": lambda: classification("classification", 2),
        "classification_adapter": lambda: classification("classification", 0, rank=2, alpha=0.4),
        # Images with several classes, one or none.
        "classification_several": lambda: classification("classification", 4, has_several=True),
        # Written out: most training code has batch normalization in its decoders.
        "segmentation_linear": lambda: segmentation("segmentation", "linear"),
        "segmentation_conv": lambda: segmentation("segmentation", "conv"),
        "dinov2_shared": lambda: dinov2(paths, "dinov2_shared", False, "centering", 0.02, {}),
        "dinov2_apart": lambda: dinov2(paths, "dinov2_apart", True, "sinkhorn_knopp", 0.005, {
            "ffn_layer": "swiglufused", "num_register_tokens": 2, "interpolate_offset": 0.0, "interpolate_antialias": True}),
        "dinov3": lambda: dinov3(paths, "dinov3", folder),
        "mae": lambda: mae(paths, "mae"),
        "ijepa": lambda: ijepa(paths, "ijepa"),
        "dino_balanced": lambda: vit("dinov2_balanced", False, ["--freeze_last_layer", "0"], more_losses=balanced(paths)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    repositories = "swav vissl classy apex lejepa dino dinov2 dinov3 moco barlowtwins vicreg mae ijepa"
    for name in repositories.split():
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--only", nargs="*")
    paths = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    check_chacha()
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for name, make in runs(paths, folder).items():
            if paths.only and name not in paths.only:
                continue
            rates = []
            hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
            made = make()
            # Runs with rates by layer know the one that these are parts of.
            made = {"lr": torch.tensor(rates)} | made
            hook.remove()
            losses = " ".join(f"{loss:.6f}" for loss in made["loss"].tolist())
            print(f"{name}: {losses}", flush=True)
            file = OUT / f"{name}.safetensors"
            save_file({key: value.detach().float().contiguous() for key, value in made.items()}, file)
            file.chmod(0o644)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
