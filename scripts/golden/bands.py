"""Golden images of many channels in tests/golden/bands/: TIFF by tifffile, PNG by Pillow, arrays by NumPy, and resizes by PyTorch.

    python scripts/golden/bands.py
"""

import pathlib
import sys

import numpy
import PIL
import tifffile
import torch
from PIL import Image

FOLDER = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "bands"
BANDS, HEIGHT, WIDTH = 5, 14, 20


def values(kind):
    """An array [C, H, W] whose values are all different from their neighbors."""
    number = numpy.arange(BANDS * HEIGHT * WIDTH).reshape(BANDS, HEIGHT, WIDTH)
    return ((number * 7919 + 13) % (251 if kind == "uint8" else 65521)).astype(kind)


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    wide, narrow = values("uint16"), values("uint8")
    wide.tofile(FOLDER / "wide.bin")
    narrow.tofile(FOLDER / "narrow.bin")
    pixels = wide.transpose(1, 2, 0)
    signed = (wide.astype("int32") % 30000 - 15000).astype("int16")
    floats = (wide.astype("float32") - 30000) / 16
    gray = {"photometric": "minisblack", "metadata": None}

    def tiff(name, data, **more):
        tifffile.imwrite(FOLDER / f"{name}.tif", data, **{**gray, **more})

    tiff("planes", wide, planarconfig="separate")
    tiff("planes_in_strips", wide, planarconfig="separate", rowsperstrip=3, compression="deflate")
    tiff("pixels", pixels, planarconfig="contig")
    tiff("tiles", pixels, planarconfig="contig", tile=(16, 16), compression="deflate", predictor=2)
    tiff("tiled_planes", wide, planarconfig="separate", tile=(16, 16), compression="deflate")
    tiff("big", pixels, planarconfig="contig", bigtiff=True, byteorder=">")
    # Red, green and blue with two further bands, as aerial images have them.
    tiff("color_and_more", pixels, planarconfig="contig", photometric="rgb", extrasamples=[0, 0], compression="deflate", predictor=2)
    tiff("color_and_more_planes", wide, planarconfig="separate", photometric="rgb", extrasamples=[0, 0])
    tiff("color_and_more_big", pixels, planarconfig="contig", photometric="rgb", extrasamples=[0, 0], bigtiff=True, byteorder=">")
    with tifffile.TiffWriter(FOLDER / "three_pages.tif") as writer:
        for band in narrow[:3]:
            writer.write(band, **gray)
    tiff("zstd", pixels, planarconfig="contig", compression="zstd")
    tiff("narrow", narrow.transpose(1, 2, 0), planarconfig="contig", compression="packbits")
    tiff("signed", signed, planarconfig="separate")
    tiff("floats", floats, planarconfig="separate", compression="deflate", predictor=3)
    with tifffile.TiffWriter(FOLDER / "pages.tif") as writer:
        for band in wide:
            writer.write(band, compression="lzw", **gray)
    with tifffile.TiffWriter(FOLDER / "overviews.tif") as writer:
        writer.write(pixels, planarconfig="contig", **gray)
        writer.write(pixels[::2, ::2], planarconfig="contig", subfiletype=1, **gray)
    with tifffile.TiffWriter(FOLDER / "mixed.tif") as writer:
        writer.write(wide[0], **gray)
        writer.write(narrow[0], **gray)
    numpy.save(FOLDER / "channels_first.npy", wide)
    numpy.save(FOLDER / "channels_last.npy", pixels)
    numpy.save(FOLDER / "floats.npy", floats.astype("float64"))
    Image.fromarray(wide[0]).save(FOLDER / "gray.png")
    for band in range(BANDS):
        tiff(f"band{band}", wide[band], compression="deflate")

    # Resize(12, bicubic, antialias) and CenterCrop(8) of torchvision, on floating-point tensors.
    image = torch.from_numpy(wide.astype("float32"))[None]
    small = torch.nn.functional.interpolate(image, size=[12, 12 * WIDTH // HEIGHT], mode="bicubic", antialias=True)
    left, top = [int(round((side - 8) / 2)) for side in (small.shape[3], small.shape[2])]
    small = small[0, :, top:top + 8, left:left + 8].clamp(0, 65535)
    small.numpy().tofile(FOLDER / "small.bin")
    versions = f"tifffile {tifffile.__version__}, NumPy {numpy.__version__}, Pillow {PIL.__version__}, PyTorch {torch.__version__}\n"
    (FOLDER / "versions.txt").write_text(versions)


if __name__ == "__main__":
    sys.exit(main())
