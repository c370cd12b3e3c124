"""Makes tests/golden/pictures/: TIFF and GIF files of other programs, and what Pillow decodes them to.

Needs Pillow, numpy, tifffile and imagecodecs. Run at the root of the repository:

    python scripts/golden/pictures.py

`pixels.csv` has for each file its size and the CRC-32 of the bytes of `convert("RGB")`.
"""

import csv
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image, __version__

OUT = Path("tests/golden/pictures")
SIZE = (70, 45)


def colors(n_channels: int) -> np.ndarray:
    """Gradients and noise, `[H, W, C]`."""
    width, height = SIZE
    rng = np.random.default_rng(n_channels)
    y, x = np.mgrid[0:height, 0:width]
    waves = [255 * x / width, 255 * y / height, 127 + 127 * np.sin(x * y / 40), 80 + x + y]
    values = np.stack(waves[:n_channels], -1) + rng.normal(0, 12, (height, width, n_channels))
    return np.clip(values, 0, 255).astype(np.uint8)


def by_pillow(values: np.ndarray, mode: str, **options) -> bytes:
    out = io.BytesIO()
    Image.fromarray(values, mode).save(out, "TIFF", **options)
    return out.getvalue()


def by_tifffile(values: np.ndarray, **options) -> bytes:
    out = io.BytesIO()
    tifffile.imwrite(out, values, metadata=None, **options)
    return out.getvalue()


def gif(screen: tuple[int, int], place: tuple[int, int], transparent: int | None, interlace: bool) -> bytes:
    """A GIF whose one image lies at `place` on a canvas of the size `screen`."""
    indices = (colors(1)[..., 0] // 8) % 20
    picture = Image.fromarray(indices, "P")
    palette = np.random.default_rng(3).integers(0, 256, 3 * 32, dtype=np.uint8)
    picture.putpalette(palette.tobytes())
    out = io.BytesIO()
    options = {} if transparent is None else {"transparency": transparent}
    picture.save(out, "GIF", interlace=interlace, optimize=False, **options)
    data = bytearray(out.getvalue())
    data[6:10] = struct.pack("<HH", *screen)
    # The image's descriptor follows the palette and the extension of transparency.
    at = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    while data[at] == 0x21:
        at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    assert data[at] == 0x2C
    data[at + 1 : at + 5] = struct.pack("<HH", *place)
    return bytes(data)


def short_palette() -> bytes:
    """A GIF of 20 indices whose palette has 16 colors."""
    data = bytearray(gif(SIZE, (0, 0), None, False))
    n_colors = 2 ** ((data[10] & 7) + 1)
    assert n_colors > 16
    data[10] = data[10] & 0xF8 | 3
    del data[13 + 3 * 16 : 13 + 3 * n_colors]
    return bytes(data)


def files() -> dict[str, bytes]:
    width, height = SIZE
    rgb, inks = colors(3), colors(4)
    tiles = {"tile": (32, 32), "photometric": "rgb", "compression": "jpeg"}
    larger = (width + 21, height + 17)
    return {
        "big.tif": by_tifffile(rgb, bigtiff=True, photometric="rgb", compression="lzw"),
        "big_endian.tif": by_tifffile(rgb, bigtiff=True, photometric="rgb", byteorder=">"),
        "strips_ycbcr.tif": by_pillow(rgb, "YCbCr", compression="jpeg", quality=85),
        "strips_rgb.tif": by_pillow(rgb, "RGB", compression="jpeg", quality=85),
        "tiles_ycbcr.tif": by_tifffile(rgb, **tiles, subsampling=(1, 1), compressionargs={"level": 80}),
        "tiles_subsampled.tif": by_tifffile(rgb, **tiles, subsampling=(2, 2), compressionargs={"level": 80}),
        "tiles_rgb.tif": by_tifffile(rgb, **tiles, compressionargs={"level": 90, "outcolorspace": "RGB"}),
        "big_tiles_ycbcr.tif": by_tifffile(rgb, **tiles, bigtiff=True, subsampling=(2, 1)),
        "gray_jpeg.tif": by_pillow(colors(1)[..., 0], "L", compression="jpeg", quality=85),
        "inks.tif": by_pillow(inks, "CMYK", compression="tiff_lzw"),
        "inks_raw.tif": by_pillow(inks, "CMYK"),
        "inks_big.tif": by_tifffile(inks, photometric="separated", bigtiff=True, compression="deflate"),
        "whole.gif": gif(SIZE, (0, 0), None, False),
        "offset.gif": gif(larger, (13, 9), None, False),
        "offset_interlaced.gif": gif(larger, (0, 17), None, True),
        "offset_transparent.gif": gif(larger, (13, 9), 7, False),
        "transparent.gif": gif(SIZE, (0, 0), 7, False),
        "beyond.gif": gif(SIZE, (13, 9), None, False),
        "short_palette.gif": short_palette(),
    }


def decoded(data: bytes) -> Image.Image:
    if data.startswith(b"MM\0+"):
        # Pillow takes 64-bit TIFF in this byte order for no image.
        return Image.fromarray(tifffile.imread(io.BytesIO(data)), "RGB")
    with Image.open(io.BytesIO(data)) as picture:
        return picture.convert("RGB")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "pixels.csv").open("w", newline="") as table:
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(["name", "width", "height", "crc32", f"by Pillow {__version__}"])
        for name, data in files().items():
            (OUT / name).write_bytes(data)
            pixels = decoded(data)
            rows.writerow([name, *pixels.size, zlib.crc32(pixels.tobytes())])


if __name__ == "__main__":
    main()
