"""The program ocelli in Python: its backbones, its features and its runs.

Everything here calls the program, which the wheel puts on PATH, so that both always agree.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["embed", "load", "runs", "program"]


def program():
    """The path of the program: `OCELLI`, or what the wheel has installed, or what is on PATH."""
    if "OCELLI" in os.environ:
        return os.environ["OCELLI"]
    beside = Path(sys.executable).with_name("ocelli")
    found = str(beside) if beside.exists() else shutil.which("ocelli")
    if not found:
        raise FileNotFoundError("the program ocelli is neither beside this Python nor on PATH; set OCELLI")
    return found


def _run(*args):
    """Standard output of the program; its last words are the error's where it fails."""
    done = subprocess.run([program(), *map(str, args)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"ocelli ended with {done.returncode}")
    return done.stdout


def load(path, *flags):
    """The backbone of `path` as a torch module in evaluation mode, which maps `[B, 3, H, W]` to `[B, D]`.

    `path` is a run, a checkpoint, or weights: what `ocelli export --checkpoint` takes. `module.preprocessing` has mean,
    std, size and crop share. Needs torch and timm. `flags` go to `ocelli export`, such as `"--student"`.
    """
    import timm

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "backbone"
        _run("export", "--checkpoint", path, "--format", "timm", "--out", out, *flags)
        module = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
        config = json.loads((out / "config.json").read_text())["pretrained_cfg"]
    module.preprocessing = {
        "mean": config["mean"],
        "std": config["std"],
        "size_px": config["input_size"][-1],
        "crop_share": config["crop_pct"],
        "interpolation": config["interpolation"],
    }
    return module


def embed(path, images, *flags):
    """Features of `images`, `[N, D]` float32, and their names in the same order.

    `path` is as for `load`; `images` a folder, or a list of paths. `flags` go to `ocelli embed`, such as `"--patches"`.
    """
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        if not isinstance(images, (str, os.PathLike)):
            listed = Path(folder) / "images.txt"
            listed.write_text("".join(f"{Path(image).resolve()}\n" for image in images))
            images = listed
        out = Path(folder) / "features.npy"
        _run("embed", "--checkpoint", path, "--images", images, "--out", out, *flags)
        rows = Path(f"{out}.rows.jsonl").read_text().splitlines()
        return np.load(out), [json.loads(row)["name"] for row in rows]


def runs(folder):
    """The runs below `folder`: a pandas table where pandas is installed, else a list of dictionaries."""
    found = json.loads(_run("runs", folder, "--json").strip().splitlines()[-1])
    rows = found if isinstance(found, list) else found["runs"]
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
