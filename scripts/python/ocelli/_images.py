"""Images in memory and in files, as `ocelli embed` takes them."""

import os
import struct
import zlib
from pathlib import Path

#: Extensions of lists of images; any other file is an image.
_LISTS = {".txt", ".csv", ".tsv", ".jsonl"}


def embed_flags(images, folder):
    """Returns the flags that name `images`, and a dictionary from names in the results to those for the user.

    Images in memory are written to PNG files in `folder`, without loss.
    """
    if isinstance(images, (str, os.PathLike)):
        path = os.fspath(images)
        if _names_shards(path):
            return ["--shards", path], {}
        if not Path(path).is_file() or Path(path).suffix.lower() in _LISTS:
            return ["--images", path], {}
        images = [images]
    lines = []
    names = {}
    for i, image in enumerate(_as_list(images)):
        if isinstance(image, (str, os.PathLike)):
            lines.append(str(Path(image).resolve()))
            continue
        path = str(Path(folder) / f"{i:08}.png")
        write_png(path, pixels_of(image))
        lines.append(path)
        names[path] = str(i)
    if not lines:
        raise ValueError("images is empty")
    listed = Path(folder) / "images.txt"
    listed.write_text("".join(f"{line}\n" for line in lines))
    return ["--images", str(listed)], names


def paths_of(images, what):
    """Returns a path or several as a list; raises TypeError for images in memory. `what` names the argument."""
    if isinstance(images, (str, os.PathLike)):
        return [images]
    if not _is_in_memory(images):
        images = list(images)
        if all(isinstance(image, (str, os.PathLike)) for image in images):
            return images
    raise TypeError(
        f"{what} must be a folder of images, shards, or a list of them, not {type(images).__name__}: only "
        "ocelli.embed takes images in memory"
    )


def _names_shards(text):
    """Returns True for shards: addresses, patterns, tars and Parquet files, and folders that hold them."""
    if "://" in text or "::" in text or any(c in text for c in "*{"):
        return True
    path = Path(text)
    files = path.iterdir() if path.is_dir() else [path]
    return any(file.name.lower().endswith((".tar", ".tar.gz", ".tgz", ".parquet")) for file in files)


def _is_in_memory(images):
    """Returns True for arrays, tensors and images of PIL."""
    return hasattr(images, "shape") or hasattr(images, "convert")


def _as_list(images):
    if hasattr(images, "convert"):
        return [images]
    if not hasattr(images, "shape"):
        return images
    import numpy as np

    array = np.asarray(images)
    return array[None] if array.ndim == 3 and array.shape[-1] == 3 else array


def pixels_of(image):
    """Returns an image as an array [H, W, 3] of uint8, from such an array or an image of PIL.

    Raises TypeError for any other, with what to do.
    """
    import numpy as np

    if hasattr(image, "convert"):
        image = image.convert("RGB")
    array = np.asarray(image)
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] == 3 and array.size > 0:
        return np.ascontiguousarray(array)
    advice = ""
    if array.ndim == 3 and array.shape[0] == 3:
        advice = "; transpose images of [3, H, W]: images.transpose(0, 2, 3, 1)"
    elif array.ndim == 2:
        advice = "; repeat the gray channel: numpy.stack([images] * 3, axis=-1)"
    elif array.dtype.kind == "f":
        advice = "; scale numbers from 0 to 1: (255 * images).round().astype('uint8')"
    raise TypeError(
        f"images in memory must be arrays [N, H, W, 3] of uint8 or images of PIL, but one is {array.dtype} of "
        f"shape {list(array.shape)}{advice}"
    )


def write_png(path, pixels):
    """Writes an array [H, W, 3] of uint8 as a PNG."""
    import numpy as np

    height, width, _ = pixels.shape
    # Each row begins with the number of its filter, 0 for none.
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")):
            file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
