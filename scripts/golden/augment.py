"""Makes tests/golden/augment/*.bin: what Pillow and torchvision do to one small image.

Needs pillow<13, torchvision and numpy. Run at the root of the repository:

    python scripts/golden/augment.py

Each file is raw RGB, 37 x 29 unless its name says otherwise. `input.bin` is the image itself.
"""

from pathlib import Path

import numpy as np
import PIL
import torchvision
import torchvision.transforms.functional as F
from PIL import Image, ImageFilter, ImageOps

OUT = Path("tests/golden/augment")
WIDTH, HEIGHT = 37, 29
# Of a crop of 27 x 22: shrunk, grown, both, to one pixel, unchanged, beyond a vector's length.
SIZES = [(16, 12), (40, 40), (1, 1), (3, 50), (27, 22), (27, 9), (13, 22), (70, 5), (65, 67), (9, 7)]

# Taps and deviations of torchvision's blur, and radii of Pillow's: boxes of less than a pixel to more than the image.
TORCHVISION_BLURS = [(9, 0.1), (9, 0.4), (9, 1.0), (9, 1.7), (9, 2.0), (7, 1.3), (23, 0.8), (23, 2.0)]
PILLOW_BLURS = [0.1, 0.25, 0.5, 1.0, 1.4, 1.45, 1.7, 2.0, 2.6, 7.5, 40.0]

# Short side and square of the evaluation transform; some margins are halves of a pixel.
EVALUATED = [(32, 28), (33, 28), (20, 20), (61, 50)]


def image() -> Image.Image:
    """Noise over gradients: every hue, black, white and gray occur."""
    rng = np.random.default_rng(5)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    smooth = np.stack([255 * x / WIDTH, 255 * y / HEIGHT, 255 * (x + y) / (WIDTH + HEIGHT)], -1)
    pixels = np.clip(smooth + rng.normal(0, 60, smooth.shape), 0, 255).astype(np.uint8)
    pixels[:4] = rng.integers(0, 256, (4, WIDTH, 1))
    return Image.fromarray(pixels)


def main() -> None:
    assert int(PIL.__version__.split(".")[0]) < 13, "Pillow 13 resizes differently"
    OUT.mkdir(parents=True, exist_ok=True)
    src = image()
    made = {
        "input": src,
        "brightness_0.7": F.adjust_brightness(src, 0.7),
        "brightness_1.35": F.adjust_brightness(src, 1.35),
        "contrast_0.6": F.adjust_contrast(src, 0.6),
        "contrast_1.4": F.adjust_contrast(src, 1.4),
        "saturation_0.8": F.adjust_saturation(src, 0.8),
        "saturation_1.2": F.adjust_saturation(src, 1.2),
        "hue_0.1": F.adjust_hue(src, 0.1),
        "hue_-0.07": F.adjust_hue(src, -0.07),
        "hue_0.37": F.adjust_hue(src, 0.37),
        "gray": F.to_grayscale(src, 3),
        "solarize": ImageOps.solarize(src, 128),
    }
    for n_taps, sigma in TORCHVISION_BLURS:
        made[f"blur_{n_taps}_{sigma}"] = F.gaussian_blur(src, [n_taps, n_taps], [sigma, sigma])
    for radius in PILLOW_BLURS:
        made[f"pillow_blur_{radius}"] = src.filter(ImageFilter.GaussianBlur(radius))
        made[f"pillow_blur_small_{radius}"] = src.resize((3, 2)).filter(ImageFilter.GaussianBlur(radius))
    made["small"] = src.resize((3, 2))
    for name, filter_ in (("bicubic", Image.BICUBIC), ("bilinear", Image.BILINEAR)):
        for w, h in SIZES:
            made[f"{name}_{w}x{h}"] = F.resized_crop(src, 3, 5, 22, 27, [h, w], filter_)
    made["tall"] = src.rotate(90, expand=True)
    for shape, source in (("wide", src), ("tall", made["tall"])):
        for resize, size in EVALUATED:
            made[f"{shape}_{resize}_{size}"] = F.center_crop(F.resize(source, resize, Image.BICUBIC), size)
    for name, result in made.items():
        (OUT / f"{name}.bin").write_bytes(np.asarray(result.convert("RGB")).tobytes())
    versions = f"pillow {PIL.__version__}, torchvision {torchvision.__version__}\n"
    (OUT / "versions.txt").write_text(versions)


if __name__ == "__main__":
    main()
