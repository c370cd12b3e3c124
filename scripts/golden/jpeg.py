"""Makes tests/golden/jpeg/: JPEG files of every kind, and what Pillow decodes them to.

Needs Pillow and numpy, and libjpeg-turbo's cjpeg for the kinds that Pillow does not write
(apt-get install libjpeg-turbo-progs). Run at the root of the repository:

    python scripts/golden/jpeg.py

`images.tar` holds the files, `pixels.csv` for each its size and the CRC-32 of its RGB bytes.
"""

import csv
import io
import struct
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, __version__, features

OUT = Path("tests/golden/jpeg")
SIZES = [(1, 1), (2, 3), (7, 5), (8, 8), (9, 17), (16, 16), (17, 33), (31, 64), (65, 23), (70, 49)]
# Sampling of each channel, as cjpeg takes it: what cameras write, and what the standard allows besides.
SAMPLINGS = ["1x1", "2x1", "2x2", "1x2", "4x1", "1x4", "4x2", "2x4", "3x1", "2x2,1x2,2x1", "1x1,2x2,1x2", "4x1,2x1,1x1"]
# Scan scripts: one channel after another, two of three together, bit by bit.
SCANS = ["0;1;2;", "0;1,2;", "0,1;2;", "0,1,2:0-0,0,1;0:1-63,0,2;2:1-63,0,0;1:1-63,0,0;0:1-63,2,1;0:1-63,1,0;0,1,2:0-0,1,0;"]


def picture(size: tuple[int, int], seed: int) -> Image.Image:
    """Gradients, edges and noise: smooth and rough blocks, all hues."""
    width, height = size
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([255 * x / width, 255 * y / height, 127 + 127 * np.sin((x * y + seed) / 40)], -1)
    noise = rng.normal(0, rng.choice([0, 10, 60]), smooth.shape)
    edges = 255 * ((x // 5 + y // 7) % 2)[..., None] * rng.choice([0, 0.5])
    return Image.fromarray(np.clip(smooth + noise + edges, 0, 255).astype(np.uint8))


def pillow(image: Image.Image, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def cjpeg(image: Image.Image, *options: str, scans: str | None = None) -> bytes:
    ppm = io.BytesIO()
    image.save(ppm, "PPM")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as script:
        if scans:
            script.write(scans.replace(";", ";\n"))
            script.flush()
            options = (*options, "-scans", script.name)
        return subprocess.run(["cjpeg", *options], input=ppm.getvalue(), capture_output=True, check=True).stdout


def segments(jpeg: bytes):
    """The markers before the pixels, each with its bytes; the pixels last."""
    at = 2
    while jpeg[at + 1] != 0xDA:
        end = at + 2 + struct.unpack(">H", jpeg[at + 2 : at + 4])[0]
        yield jpeg[at + 1], jpeg[at:end]
        at = end
    yield 0xDA, jpeg[at:]


def without(jpeg: bytes, *markers: int) -> bytes:
    return jpeg[:2] + b"".join(body for marker, body in segments(jpeg) if marker not in markers)


def made() -> dict[str, bytes]:
    files = {}
    for n, size in enumerate(SIZES):
        name = f"{size[0]}x{size[1]}"
        for subsampling in range(3):
            for progressive in (False, True):
                kind = f"{('444', '422', '420')[subsampling]}_{'progressive' if progressive else 'baseline'}"
                quality = (30, 75, 90, 100)[(n + subsampling) % 4]
                image = picture(size, 10 * n + subsampling)
                options = dict(quality=quality, progressive=progressive)
                files[f"{kind}_{name}"] = pillow(image, subsampling=subsampling, **options)
                files[f"{kind}_restarts_{name}"] = pillow(
                    image, subsampling=subsampling, restart_marker_blocks=1 + n % 3, **options
                )
                files[f"gray_{'progressive' if progressive else 'baseline'}_{name}"] = pillow(image.convert("L"), **options)
                files[f"cmyk_{kind}_{name}"] = pillow(image.convert("CMYK"), subsampling=subsampling, **options)
    for n, sampling in enumerate(SAMPLINGS):
        for size in [(9, 17), (37, 51), (70, 49)]:
            image = picture(size, 200 + n)
            name = f"{sampling.replace(',', '_')}_{size[0]}x{size[1]}"
            quality = ("-quality", str((2, 25, 60, 95)[n % 4]))
            files[f"sampling_{name}"] = cjpeg(image, *quality, "-sample", sampling)
            files[f"sampling_progressive_{name}"] = cjpeg(image, *quality, "-sample", sampling, "-progressive")
            files[f"sampling_restart_rows_{name}"] = cjpeg(image, *quality, "-sample", sampling, "-restart", "1")
            files[f"rgb_{name}"] = cjpeg(image, *quality, "-sample", sampling, "-rgb")
    for n, script in enumerate(SCANS):
        for size in [(20, 15), (70, 49)]:
            for sampling in ("1x1", "2x2"):
                name = f"scans_{n}_{sampling}_{size[0]}x{size[1]}"
                files[name] = cjpeg(picture(size, 300 + n), "-sample", sampling, scans=script)
    files |= unusual(picture((45, 38), 400))
    return files


def unusual(image: Image.Image) -> dict[str, bytes]:
    plain = pillow(image, quality=85)
    cmyk = pillow(image.convert("CMYK"), quality=85)
    head = b"".join(body for marker, body in segments(plain) if marker != 0xDA)
    scan = next(body for marker, body in segments(plain) if marker == 0xDA)
    adobe = lambda transform: b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform])
    bare = without(plain, 0xE0)
    ids = lambda names: bare.replace(b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01", names[0]).replace(
        b"\x03\x01\x00\x02\x11\x03\x11", names[1]
    )
    rgb_ids = ids((b"\x03R\x22\x00G\x11\x01B\x11\x01", b"\x03R\x00G\x11B\x11"))
    other_ids = ids((b"\x03\x05\x22\x00\x06\x11\x01\x07\x11\x01", b"\x03\x05\x00\x06\x11\x07\x11"))
    assert rgb_ids != bare and other_ids != bare
    return {
        "no_huffman_tables": without(plain, 0xC4),
        "no_jfif": bare,
        "ids_rgb": rgb_ids,
        "ids_unknown": other_ids,
        "adobe_rgb": bare[:2] + adobe(0) + bare[2:],
        "adobe_ycc": bare[:2] + adobe(1) + bare[2:],
        "adobe_unknown": bare[:2] + adobe(7) + bare[2:],
        "jfif_and_adobe": plain[:2] + head + adobe(0) + scan,
        "ycck": cmyk.replace(adobe(0)[4:], adobe(2)[4:]),
        "cmyk_without_adobe": without(cmyk, 0xEE),
        "fill_bytes": plain[:2] + b"\xff\xff\xff" + plain[2:-2] + b"\xff\xff\xff\xff\xff\xd9",
        "bytes_behind_the_end": plain + b"behind \xff\xd9 the end",
        "bytes_between_segments": plain[:2] + head + b"\x00\x11\x22" + scan,
        "comment": pillow(image, comment=b"a comment \xff\xd9"),
        "long_exif": plain[:2] + b"\xff\xe1" + struct.pack(">H", 3008) + b"Exif\0\0" + b"\xff\xd8" * 1500 + plain[2:],
        "pixels_end_early": plain[:2] + head + scan[: len(scan) // 2] + b"\xff\xd9",
        "wrong_code": plain[:2] + head + scan[:200] + b"\xfe" * 6 + scan[206:],
        "lost_restart": (lambda jpeg: jpeg.replace(b"\xff\xd2", b"", 1))(pillow(image, restart_marker_blocks=2)),
        "restart_out_of_turn": (lambda jpeg: jpeg.replace(b"\xff\xd2", b"\xff\xd3", 1))(pillow(image, restart_marker_blocks=2)),
        "sixteen_bit_steps": cjpeg(image, "-quality", "1"),
    }


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with tarfile.open(OUT / "images.tar", "w", format=tarfile.USTAR_FORMAT) as tar, open(OUT / "pixels.csv", "w") as table:
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(["name", "width_px", "height_px", "crc32"])
        for name, jpeg in made().items():
            info = tarfile.TarInfo(f"{name}.jpg")
            info.size = len(jpeg)
            tar.addfile(info, io.BytesIO(jpeg))
            rgb = Image.open(io.BytesIO(jpeg)).convert("RGB")
            rows.writerow([name, *rgb.size, zlib.crc32(rgb.tobytes())])
    (OUT / "versions.txt").write_text(f"pillow {__version__}\nlibjpeg-turbo {features.version('libjpeg_turbo')}\n")


if __name__ == "__main__":
    main()
