"""Makes tests/golden/augment/crop_boxes.csv: torchvision's random-resized crops, given their uniforms.

Needs torch and torchvision. Run at the root of the repository:

    python scripts/golden/crop.py

`torch.empty(1).uniform_` and `torch.randint` are replaced by ones that note what they drew. A row is: image width
and height, smallest and largest scale, the uniforms of all tries joined by spaces, the offsets drawn (top and left,
empty where the centered fallback was taken), and the box: top, left, height, width.
"""

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop

OUT = Path("tests/golden/augment/crop_boxes.csv")
SIZES = [(500, 375), (333, 500), (32, 32), (1000, 20), (17, 400), (1, 1), (640, 427), (7, 5)]
SCALES = [(0.08, 1.0), (0.32, 1.0), (0.05, 0.32), (0.4, 1.0), (0.9, 1.0)]
RATIO = (3 / 4, 4 / 3)


def main() -> None:
    rng = np.random.default_rng(7)
    drawn: list[float] = []
    offsets: list[int] = []
    empty = torch.empty

    class Drawing:
        def uniform_(self, low, high):
            # As ATen does for f32: 24 random bits, scaled and shifted in f32.
            unit = np.float32(rng.integers(0, 1 << 24)) * np.float32(2**-24)
            drawn.append(float(unit))
            low, high = np.float32(float(low)), np.float32(float(high))
            return torch.tensor([unit * (high - low) + low], dtype=torch.float32)

    def randint(low, high, size):
        value = int(rng.integers(low, high))
        offsets.append(value)
        return torch.tensor([value])

    rows = []
    torch.empty, real_randint, torch.randint = lambda *a, **k: Drawing(), torch.randint, randint
    try:
        for width, height in SIZES:
            image = Image.new("RGB", (width, height))
            for low, high in SCALES:
                for _ in range(12):
                    drawn.clear()
                    offsets.clear()
                    box = RandomResizedCrop.get_params(image, [low, high], list(RATIO))
                    uniforms = " ".join(repr(u) for u in drawn)
                    rows.append([width, height, low, high, uniforms, " ".join(map(str, offsets)), *box])
    finally:
        torch.empty, torch.randint = empty, real_randint
    with OUT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["width", "height", "scale_low", "scale_high", "uniforms", "offsets", "top", "left", "h", "w"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
