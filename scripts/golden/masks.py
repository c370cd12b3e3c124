"""Makes tests/golden/augment/mask_*.bin: crops of a mask, resized by Pillow's nearest neighbor.

Needs pillow, torchvision and numpy. Run at the root of the repository:

    python scripts/golden/masks.py

`mask_input.bin` is the mask, 37 x 29 bytes of classes; `mask_WxH.bin` is the same crop as in augment.py in this size,
and `mask_whole_WxH.bin` the whole mask. `mask_RESIZE_SIZE.bin` is the square of an evaluation.
"""

from pathlib import Path

import numpy as np
import PIL
import torchvision
import torchvision.transforms.functional as F
from PIL import Image

OUT = Path("tests/golden/augment")
WIDTH, HEIGHT = 37, 29
# Those of augment.py, and heights at which sums of steps and products of them round to other rows.
SIZES = [(16, 12), (40, 40), (1, 1), (3, 50), (27, 22), (27, 9), (13, 22), (70, 5), (65, 67), (9, 7), (33, 33), (9, 55)]
WHOLE = [(32, 32), (98, 112), (640, 3)]
EVALUATED = [(32, 28), (33, 28), (20, 20), (61, 50)]


def main() -> None:
    classes = np.random.default_rng(6).integers(0, 256, (HEIGHT, WIDTH), np.uint8)
    mask = Image.fromarray(classes)
    made = {"input": mask}
    for w, h in SIZES:
        made[f"{w}x{h}"] = F.resized_crop(mask, 3, 5, 22, 27, [h, w], F.InterpolationMode.NEAREST)
    for w, h in WHOLE:
        made[f"whole_{w}x{h}"] = mask.resize((w, h), Image.Resampling.NEAREST)
    for resize, size in EVALUATED:
        made[f"{resize}_{size}"] = F.center_crop(F.resize(mask, resize, F.InterpolationMode.NEAREST), size)
    for name, result in made.items():
        (OUT / f"mask_{name}.bin").write_bytes(np.asarray(result).tobytes())
    versions = f"pillow {PIL.__version__}, torchvision {torchvision.__version__}\n"
    (OUT / "mask_versions.txt").write_text(versions)


if __name__ == "__main__":
    main()
