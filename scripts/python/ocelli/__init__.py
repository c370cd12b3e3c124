"""Python interface of Ocelli: training, features, backbones and runs.

Commands run in this process, with the code of the program (`ocelli._ocelli`) and the same files and messages.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ocelli import _ocelli

__all__ = ["Run", "embed", "load", "pretrain", "program", "runs"]


def program():
    """Returns the path of the program, to start it as a process.

    It is `OCELLI`, else the one that the wheel installed, else the one on PATH.
    """
    if "OCELLI" in os.environ:
        return os.environ["OCELLI"]
    beside = Path(sys.executable).with_name("ocelli")
    found = str(beside) if beside.exists() else shutil.which("ocelli")
    if not found:
        raise FileNotFoundError("the program ocelli is neither beside this Python nor on PATH; set OCELLI")
    return found


def _run(*args):
    """Runs a command and returns its output; raises RuntimeError with the program's text if it fails."""
    return _ocelli.run([str(word) for word in args], lambda line: None)


class Run:
    """A run in its work directory."""

    def __init__(self, workdir, steps=None, seconds=None):
        self.workdir = Path(workdir)
        #: Number of steps of the run; None for a run that was not trained by this call.
        self.steps = steps
        #: Seconds that the call took.
        self.seconds = seconds

    def __getitem__(self, key):
        return {"steps": self.steps, "seconds": self.seconds, "workdir": str(self.workdir)}[key]

    def __repr__(self):
        return f"Run({str(self.workdir)!r}, steps={self.steps})"

    @property
    def metrics(self):
        """Numbers of metrics.jsonl as arrays of float64 by name, such as `metrics["train/loss"]`.

        Each has one element per row, NaN where the row lacks the number; `metrics["step"]` has the steps.
        """
        import numpy as np

        rows = [json.loads(line) for line in (self.workdir / "metrics.jsonl").read_text().splitlines()]
        names = {}
        for row in rows:
            for name, value in row.items():
                if _is_number(value):
                    names.setdefault(name, np.full(len(rows), np.nan))
        for name, values in names.items():
            for i, row in enumerate(rows):
                if _is_number(row.get(name)):
                    values[i] = row[name]
        return names


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def pretrain(recipe, images, workdir, *flags, settings=None, show_progress=True):
    """Trains `recipe` on `images` in this process and returns a `Run`.

    `recipe` is the name or file of a recipe; `images` is a folder, a list of shards, or anything else that
    `ocelli pretrain --shards` takes; `settings` is a dictionary of recipe keys and values, such as
    `{"optim.batch_size": 32}`; `flags` are further flags of `ocelli pretrain`. Calling it again with the same
    arguments resumes the run. Warnings are printed; progress is shown as a bar if tqdm is installed (also in
    notebooks), otherwise as a line per second. Other threads keep running. An interrupt saves a checkpoint, ends
    the run, and raises KeyboardInterrupt.
    """
    images = [images] if isinstance(images, (str, os.PathLike)) else images
    command = ["pretrain", "--recipe", recipe, "--shards", *images, "--workdir", workdir, "--json", *flags]
    for key, value in (settings or {}).items():
        command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    command += ["--log-format", "json", "--log-every", "1"]
    show = _Progress(show_progress)
    try:
        output = _ocelli.run([str(word) for word in command], show.line)
    finally:
        show.close()
    result = json.loads(output.strip().splitlines()[-1])
    return Run(result["workdir"], result["steps"], result["seconds"])


class _Progress:
    """Shows a run's progress from the messages of the program."""

    def __init__(self, is_shown):
        self.bar = None
        self.is_shown = is_shown
        try:
            from tqdm.auto import tqdm
        except ImportError:
            tqdm = None
        self.tqdm = tqdm

    def line(self, line):
        """Shows a message and returns its text."""
        try:
            said = json.loads(line)
            level, text = said["level"], said["message"]
        except (ValueError, KeyError, TypeError):
            said, level, text = {}, "warning", line.rstrip()
        if self.is_shown and "step" in said and self.tqdm:
            if self.bar is None:
                self.bar = self.tqdm(total=said["total_steps"], unit="step", initial=said["step"])
            self.bar.set_postfix(loss=said["loss"], refresh=False)
            self.bar.update(said["step"] - self.bar.n)
        elif self.is_shown and ("step" in said or level != "info"):
            print(text, file=sys.stderr)
        return text

    def close(self):
        if self.bar is not None:
            self.bar.close()


def load(path, *flags):
    """Returns the backbone of `path` as a torch module in evaluation mode: `[B, 3, H, W]` to `[B, D]`.

    `path` is a run, a checkpoint or weights, as for `ocelli export --checkpoint`. `module.preprocessing` has mean, std,
    size, crop share and interpolation. Needs torch and timm. `flags` are passed to `ocelli export`, such as
    `"--network", "student"`.
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
    """Returns the features of `images`, `[N, D]` float32, and the image names in the same order.

    `path` is as for `load`; `images` is a folder or a list of paths. `flags` are passed to `ocelli embed`, such as
    `"--patches"`.
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
    """Returns the runs below `folder`: a pandas DataFrame if pandas is installed, else a list of dictionaries."""
    found = json.loads(_run("runs", folder, "--json").strip().splitlines()[-1])
    rows = found if isinstance(found, list) else found["runs"]
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
