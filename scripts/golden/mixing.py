"""Makes golden files of mixup, cutmix, label smoothing and random erasing, with timm's code.

Needs timm (1.0.31 made the files). Run at the root of the repository:

    python scripts/golden/mixing.py

Random functions of NumPy and Python are replaced by ones whose draws are known. In tests/golden/augment:
`mixing_input.bin` holds four images [3, 12, 12], `mixing_CASE.bin` the same ones after `FastCollateMixup`, and
`mixing.csv` a row for each case: name, the share drawn, x and y of the box's center, and the share after the box was
cut off. timm mixes image i with the last but i, Ocelli with the one half a batch later: the batch is put into timm's
order, and back. `erased_boxes.csv` has a row for each view that `RandomErasing` erased a box of: its side, the shares
and logarithms of ratios of all tries joined by spaces, and the box: top, left, height, width.
tests/golden/training/mixing.safetensors holds scores [4, 2, 5], classes, a share, and loss and gradient of
`SoftTargetCrossEntropy` for `mixup_target`.
"""

import csv
from pathlib import Path

import numpy as np
import timm
import timm.data.mixup as mixup
import timm.data.random_erasing as random_erasing
import torch
from safetensors.torch import save_file
from timm.loss import SoftTargetCrossEntropy

OUT = Path("tests/golden/augment")
N_IMAGES, SIZE = 4, 12
# timm's place of each of our images.
PLACES = [0, 1, 3, 2]
# Name, share, and x and y of the center of the box.
CASES = [
    ("mixup_0.3", 0.3, 0, 0),
    ("mixup_0.5", 0.5, 0, 0),
    ("mixup_0.8713", 0.8713, 0, 0),
    ("cutmix_0.4", 0.4, 6, 5),
    ("cutmix_0.7", 0.7, 0, 11),
    ("cutmix_0.05", 0.05, 10, 2),
]
# Side of the views, and the largest share of a box: with most of the view, some boxes do not fit.
ERASED = [(224, 1 / 3), (32, 1 / 3), (17, 0.9), (8, 0.9)]


def mixed(images: np.ndarray, name: str, share: float, x: int, y: int) -> tuple[np.ndarray, float]:
    """Returns the images after they are mixed, and the share that they keep."""
    centers = [y, x]

    class Drawn:
        rand = staticmethod(lambda *_: 0.0)
        beta = staticmethod(lambda *_: share)
        randint = staticmethod(lambda *_, **__: centers.pop(0))

    kept = []
    target = mixup.mixup_target

    def noted(targets, n_classes, share, *more):
        kept.append(share)
        return target(targets, n_classes, share, *more)

    is_cut = name.startswith("cutmix")
    collate = mixup.FastCollateMixup(0.0 if is_cut else 1.0, 1.0 if is_cut else 0.0, num_classes=N_IMAGES)
    batch = [None] * N_IMAGES
    for image, place in enumerate(PLACES):
        batch[place] = (images[image], image)
    real, np.random, mixup.mixup_target = np.random, Drawn, noted
    try:
        out, _ = collate(batch)
    finally:
        np.random, mixup.mixup_target = real, target
    return out.numpy()[PLACES], float(kept[0])


def write_mixed(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, (N_IMAGES, 3, SIZE, SIZE), dtype=np.uint8)
    images.tofile(OUT / "mixing_input.bin")
    rows = []
    for name, share, x, y in CASES:
        out, kept = mixed(images, name, share, x, y)
        out.tofile(OUT / f"mixing_{name}.bin")
        rows.append([name, share, x, y, repr(kept)])
    with (OUT / "mixing.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", "drawn", "x", "y", "share"])
        writer.writerows(rows)


def write_erased(rng: np.random.Generator) -> None:
    drawn: list[float] = []

    class Drawn:
        @staticmethod
        def random() -> float:
            return 0.0

        @staticmethod
        def uniform(low: float, high: float) -> float:
            drawn.append(low + (high - low) * rng.random())
            return drawn[-1]

        @staticmethod
        def randint(low: int, high: int) -> int:
            return int(rng.integers(low, high + 1))

    rows = []
    real, random_erasing.random = random_erasing.random, Drawn
    try:
        for size, largest in ERASED:
            for _ in range(50):
                drawn.clear()
                erase = random_erasing.RandomErasing(1.0, max_area=largest, mode="const", device="cpu")
                view = erase(torch.ones(1, size, size))[0]
                erased = (view == 0).nonzero()
                if len(erased) == 0:
                    continue
                top, left = erased.min(0).values.tolist()
                bottom, right = erased.max(0).values.tolist()
                tries = " ".join(repr(value) for value in drawn)
                rows.append([size, tries, top, left, bottom - top + 1, right - left + 1])
    finally:
        random_erasing.random = real
    with (OUT / "erased_boxes.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["size", "tries", "top", "left", "h", "w"])
        writer.writerows(rows)


def write_loss() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(4, 2, 5, generator=generator, dtype=torch.float64).requires_grad_()
    classes = torch.tensor([3, 0, 3, 4])
    share = float(np.float32(0.7))
    # As for images: ours in timm's order, and back.
    targets = mixup.mixup_target(classes[PLACES], 5, share, 0.1)[PLACES].double()
    losses = [SoftTargetCrossEntropy()(scores[:, view], targets) for view in range(2)]
    loss = sum(losses) / 2
    loss.backward()
    stored = {
        "scores": scores.detach(),
        "share": torch.tensor([share]),
        "loss": loss.detach()[None],
        "grad": scores.grad.reshape(-1),
    }
    stored = {name: value.float().contiguous() for name, value in stored.items()}
    stored["classes"] = classes.to(torch.uint8)
    save_file(stored, "tests/golden/training/mixing.safetensors")


def main() -> None:
    rng = np.random.default_rng(9)
    write_mixed(rng)
    write_erased(rng)
    write_loss()
    print(f"timm {timm.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
