"""Images in memory and in files, as `ocelli embed` takes them."""

import json
import os
import struct
import warnings
import zlib
from pathlib import Path

#: Extensions of lists of images; any other file is an image.
_LISTS = {".txt", ".csv", ".tsv", ".jsonl"}

#: Ends of the names of shards, and of Parquet files of images.
_SHARDS = (".tar", ".tar.gz", ".tgz", ".parquet")

#: Extensions of images, as in `prep::files`, without that of arrays, which may be features.
_IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".tga"}
_IMAGES |= {".pbm", ".pgm", ".pnm", ".ppm"}

#: Pictures that `ocelli curate` and `ocelli shards dedup` write beside shards.
_SHEETS = {"copies.png", "outliers.png", "pairs.png"}

#: Files of the work directory of a run, whose pictures are no images of a data set.
_RUN_FILES = {"plan.toml", "starts.jsonl"}


def embed_flags(images, folder):
    """Returns the flags that name `images`, and a dictionary from names in the results to those for the user.

    Images in memory are written to PNG files in `folder`, without loss.
    """
    images = _as_list(images)
    if isinstance(images, (str, os.PathLike)):
        path = os.fspath(images)
        if Path(path).is_dir():
            return [_flag_of_folder(path), path], {}
        if _names_shards(path):
            return ["--shards", path], {}
        if not Path(path).is_file() or Path(path).suffix.lower() in _LISTS:
            return ["--images", path], {}
        images = [images]
    lines = []
    names = {}
    for i, (expression, image) in enumerate(_with_expressions(images)):
        if isinstance(image, (str, os.PathLike)):
            lines.append(str(Path(image).resolve()))
            continue
        path = str(Path(folder) / f"{i:08}.png")
        write_png(path, pixels_of(image, expression))
        lines.append(path)
        names[path] = str(i)
    if not lines:
        raise ValueError("images is empty")
    # In a list of lines, a word after a space may be a class.
    listed = Path(folder) / "images.jsonl"
    listed.write_text("".join(json.dumps({"path": line}) + "\n" for line in lines))
    return ["--images", str(listed)], names


def names_for_user(found, names, folder):
    """Returns the names `found` in results of a list in `folder`, those in the dictionary `names` replaced."""
    # The program names files in the folder of a list relative to it.
    return [names.get(str(Path(folder, name)), name) for name in found]


def left_out_in_words(left_out, flaws):
    """Returns a warning about the images `left_out`, of which the first have these `flaws`."""
    unusable = "1 unusable image" if len(left_out) == 1 else f"{len(left_out)} unusable images"
    listed = ", ".join(f"{name} ({flaw})" for name, flaw in zip(left_out, flaws))
    n_others = len(left_out) - len(flaws)
    return f"{unusable} without a row: {listed}" + (f", and {n_others} more" if n_others else "")


def paths_of(images, what):
    """Returns a path or several as a list; raises TypeError for anything else. `what` names the argument."""
    given = _as_list(images)
    if isinstance(given, (str, os.PathLike)):
        return [given]
    if _is_in_memory(given):
        raise TypeError(
            f"{what} must be a path or a list of paths, not {type(images).__name__}: only ocelli.embed takes images "
            "in memory"
        )
    paths = list(given)
    for i, path in enumerate(paths):
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"{what} must be a path or a list of paths, but {what}[{i}] is {_described(path)}")
    return paths


def _as_list(values):
    """Returns a column of a data frame or an array of one dimension as a list; anything else as it is."""
    if hasattr(values, "tolist") and getattr(values, "ndim", 1) < 2:
        return values.tolist()
    return values


def _flag_of_folder(path):
    """Returns the flag of `ocelli embed` for a folder: `--images` if there are images in it or below it.

    A folder with shards in it and without images has `--shards`. Of one with both, the program reads what the flag
    names; here it is the images, with a warning.
    """
    shards = sorted(name for name in os.listdir(path) if _is_shard(name))
    if not shards:
        return "--images"
    if not _holds_images(path):
        return "--shards"
    first = Path(path, shards[0])
    # The level is that of the call of ocelli.embed.
    warnings.warn(
        f"{path} holds images and shards: only the images are embedded; for shards, give their paths, such as {first}",
        stacklevel=4,
    )
    return "--images"


def _holds_images(folder):
    """Returns True if an image is in `folder` or below it, except for hidden folders and pictures of the program."""
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        is_run = path != folder and not _RUN_FILES.isdisjoint(files)
        if is_run or real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(_is_image(name) for name in files):
            return True
    return False


def _is_image(name):
    return Path(name).suffix.lower() in _IMAGES and name not in _SHEETS and not name.startswith(".")


def _is_shard(name):
    return name.lower().endswith(_SHARDS) and not name.startswith(".")


def _names_shards(text):
    """Returns True for the name of a shard, and for an address or a pattern that is not the name of a file."""
    if _is_shard(Path(text).name):
        return True
    return not Path(text).exists() and ("://" in text or "::" in text or any(c in text for c in "*?[{"))


def _is_in_memory(images):
    """Returns True for arrays, tensors and images of PIL."""
    return hasattr(images, "shape") or hasattr(images, "convert")


def _with_expressions(images):
    """Returns the elements of `images`, paths or images, each after the expression that errors name it by."""
    if hasattr(images, "convert"):
        return [("images", images)]
    if hasattr(images, "shape"):
        array = checked_array(images, "images")
        if array.ndim == 3:
            return [("images", array)]
        images = array
    return [(f"images[{i}]", image) for i, image in enumerate(images)]


def pixels_of(image, expression):
    """Returns an array [H, W, 3] of uint8, or [H, W] of uint16, from such an array or an image of PIL.

    Raises TypeError for any other image, with what to do; `expression` names it.
    """
    if hasattr(image, "convert"):
        return _pixels_of_pil(image, expression)
    if not hasattr(image, "shape"):
        raise TypeError(f"images must be paths, arrays or images of PIL, but {expression} is {_described(image)}")
    array = checked_array(image, expression)
    if array.ndim != 3:
        raise TypeError(f"{expression} must be one image [H, W, 3], but is {_described(array)}")
    return array


def _pixels_of_pil(image, expression):
    """Returns an image of PIL as an array [H, W, 3] of uint8, or [H, W] of uint16 if it has 16 bits."""
    import numpy as np

    # PIL converts these modes to RGB by clipping at 255.
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)
    if image.mode.startswith(("I", "F")):
        raise TypeError(
            f"{expression} is an image of PIL of mode {image.mode}, whose range is not known: embed the file it is "
            "from, or scale it to 8 bits yourself"
        )
    return np.asarray(image.convert("RGB"))


def checked_array(images, expression):
    """Returns one image [H, W, 3] or several [N, H, W, 3] of uint8 as an array of NumPy.

    Raises TypeError for any other, with what to do; `expression` names it.
    """
    import numpy as np

    array = np.asarray(images)
    if array.dtype == np.uint8 and array.ndim in (3, 4) and array.shape[-1] == 3 and 0 not in array.shape[-3:]:
        return np.ascontiguousarray(array)
    message = (
        "images in memory must be arrays [N, H, W, 3] or [H, W, 3] of uint8, or images of PIL, but "
        f"{expression} is {_described(array)}"
    )
    if not isinstance(images, np.ndarray):
        expression = f"numpy.asarray({expression})"
    for advice in (_advice_on_shape(array.shape, expression), _advice_on_type(array.dtype, expression)):
        if advice:
            message += f"; {advice}"
    raise TypeError(message)


def _advice_on_shape(shape, expression):
    """Returns how images of `shape` become [N, H, W, 3] or [H, W, 3]; None if they are, or if it is not known."""
    n_dims = len(shape)
    if n_dims not in (2, 3, 4) or (n_dims > 2 and shape[-1] == 3):
        return None
    if n_dims == 3 and shape[0] == 3:
        return f"transpose an image [3, H, W]: {expression}.transpose(1, 2, 0)"
    if n_dims == 4 and shape[1] == 3:
        return f"transpose images [N, 3, H, W]: {expression}.transpose(0, 2, 3, 1)"
    if n_dims > 2 and shape[-1] == 4:
        return f"leave out the fourth channel: {expression}[..., :3]"
    if n_dims > 2 and shape[-1] == 1:
        return f"repeat the gray channel: numpy.repeat({expression}, 3, axis=-1)"
    if n_dims == 4 and shape[1] == 1:
        return f"repeat the gray channel: numpy.stack([{expression}[:, 0]] * 3, axis=-1)"
    if n_dims == 4:
        return None
    return f"repeat the gray channel: numpy.stack([{expression}] * 3, axis=-1)"


def _advice_on_type(dtype, expression):
    """Returns how numbers of `dtype` become uint8; None if they are, or if it is not known."""
    if dtype.kind == "f":
        return f"scale numbers from 0 to 1: (255 * {expression}).round().astype('uint8')"
    if dtype == "uint16":
        return f"keep the upper 8 of 16 bits: ({expression} >> 8).astype('uint8'), or embed files of 16 bits"
    if dtype.kind in "iu" and dtype != "uint8":
        return f"convert numbers from 0 to 255: {expression}.astype('uint8')"
    return None


def _described(value):
    """Returns what `value` is, for errors."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {list(value.shape)}"
    return repr(value)[:60]


def write_png(path, pixels):
    """Writes an array as a PNG: [H, W, 3] of uint8 in color, or [H, W] of uint16 in gray."""
    import numpy as np

    height, width = pixels.shape[:2]
    is_color = pixels.ndim == 3
    # The larger byte of 16 bits is first.
    values = np.ascontiguousarray(pixels, np.uint8 if is_color else ">u2").view(np.uint8).reshape(height, -1)
    # Each row begins with the number of its filter, 0 for none.
    rows = np.pad(values, ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", width, height, 8 if is_color else 16, 2 if is_color else 0, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")):
            file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
