"""Python interface of Ocelli: training, features, scores, backbones, reports and lists of runs.

Commands run in this process, with the code of the program (`ocelli._ocelli`) and the same files and messages.
"""

import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

try:
    from ocelli import _ocelli
except ImportError as error:
    if "_ocelli" not in str(error):
        raise
    message = "the compiled part of ocelli is missing: install the wheel, or run `maturin develop` in the folder scripts"
    raise ImportError(message) from error
from ocelli._errors import (
    BugError,
    CheckError,
    ConfigurationError,
    DataError,
    Error,
    NotFiniteError,
    RankError,
    error_of,
)
from ocelli._images import embed_flags, left_out_in_words, names_for_user, paths_of
from ocelli._messages import Messages
from ocelli._settings import set_flags

__all__ = [
    "BugError",
    "CheckError",
    "ConfigurationError",
    "DataError",
    "Error",
    "NotFiniteError",
    "RankError",
    "Run",
    "Runs",
    "embed",
    "export",
    "finetune",
    "load",
    "pretrain",
    "probe",
    "program",
    "report",
    "runs",
    "seed_table",
]

#: Release of the program whose code this is.
__version__ = _ocelli.__version__


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


def _run(*words, show_progress=False):
    """Runs a command, shows its messages, and returns its output; raises an `Error` if it fails."""
    with Messages(show_progress) as messages:
        words = [_word(word) for word in words]
        words += [_word(flag) for flag in messages.flags(words)]
        exit_code, text = _ocelli.run(words, messages.show)
    if exit_code != 0:
        raise error_of(exit_code, text)
    return text


def _word(word):
    return os.fspath(word) if isinstance(word, os.PathLike) else str(word)


def _answer(output):
    """Returns the line of JSON at the end of a command's output."""
    return json.loads(output.strip().splitlines()[-1])


class Run:
    """A run in its work directory. It can be passed wherever the path of a run is expected."""

    def __init__(self, workdir, steps=None, seconds=None):
        self.workdir = Path(workdir)
        #: Number of steps of the run; None for a run that was not trained by this call.
        self.steps = steps
        #: Seconds that the call took.
        self.seconds = seconds
        #: Percentage of the validation images that is classified correctly, after `finetune`; None for masks.
        self.top1 = None
        #: Mean intersection over union of classes of pixels, in percent, after `finetune` with masks.
        self.miou = None
        #: Bounds of the middle 95 % of resampled validation sets, of `top1`, `miou` or `mean_average_precision`.
        self.interval = None
        #: Mean average precision and F1 in percent, in place of `top1`, if an image may have several classes.
        self.mean_average_precision = None
        self.f1 = None
        #: Percentage of the pixels that is labeled correctly, after `finetune` with masks.
        self.pixel_accuracy = None
        #: Number of steps after which the scored weights are the best, after `finetune` with `run.patience`.
        self.best_step = None
        #: The scores on the images of `"--test-shards"`, such as `top1` and `interval`, as a dictionary, after
        #: `finetune` with that flag.
        self.test = None
        #: Scores of the features before and after training, by metric, after `finetune` with `"--baseline"`.
        self.baseline = None

    def __fspath__(self):
        return str(self.workdir)

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

    `recipe` is the name or file of a recipe, or None to have one chosen, with `"--hours", 8` among the `flags`;
    `images` is a folder, a list of shards, or anything else that `ocelli pretrain --shards` takes; `settings` is a
    dictionary of recipe keys and values, such as `{"optim.batch_size": 32, "optim.length": {"steps": 100}}`; a text is
    passed as `--set` takes it. `flags` are further flags of `ocelli pretrain`. Calling it again with the same arguments
    resumes the run. Warnings are printed; with `show_progress`, so are notes and a line of progress. Other threads keep
    running. An interrupt saves a checkpoint, ends the run, and raises KeyboardInterrupt.
    """
    images = paths_of(images, "images")
    command = ["pretrain", "--shards", *images, "--workdir", workdir, "--json", *flags]
    if recipe is not None:
        command += ["--recipe", recipe]
    result = _answer(_run(*command, *set_flags(settings), show_progress=show_progress))
    return Run(result["workdir"], result["steps"], result["seconds"])


def finetune(weights, images, validation, workdir, *flags, recipe="finetune", settings=None, show_progress=True):
    """Trains a classifier on the labeled `images` in this process, scores it on `validation`, and returns a `Run`.

    `weights` is a run, a checkpoint or weights, as for `load`; None starts from random weights, with a recipe that has
    a backbone of its own, such as `"classify_cifar"`. `images` and `validation` are folders with one sub-folder per
    class, or shards, or lists of them; with None for `validation`, a tenth of `images` is held out. The run has the
    percentage of the validation images that is classified correctly, `run.top1`, and the bounds of the middle 95 % of
    resampled sets, `run.interval`. With several classes per image (`settings={"method.loss": "binary_cross_entropy"}`),
    it has `run.mean_average_precision` and `run.f1` instead of `run.top1`. With the recipe `"segment"`, both are shards
    of images with masks, and the run has `run.miou` instead, and `run.pixel_accuracy`. Everything else is as in
    `pretrain`.
    """
    command = ["finetune", "--recipe", recipe, "--workdir", workdir, "--json", *flags]
    command += ["--shards", *paths_of(images, "images")]
    if validation is not None:
        command += ["--val-shards", *paths_of(validation, "validation")]
    if weights is not None:
        command += ["--checkpoint", weights]
    result = _answer(_run(*command, *set_flags(settings), show_progress=show_progress))
    run = Run(result["workdir"], result["steps"], result["seconds"])
    run.top1 = result.get("top1")
    run.mean_average_precision = result.get("mAP")
    run.f1 = result.get("F1")
    run.miou = result.get("miou")
    run.pixel_accuracy = result.get("pixel_accuracy")
    run.interval = result["interval"]
    run.best_step = result.get("best_step")
    run.test = result.get("test")
    run.baseline = result.get("baseline")
    return run


def load(path, *flags):
    """Returns the backbone of `path` as a torch module in evaluation mode: `[B, 3, H, W]` to `[B, D]`.

    `path` is a run, a checkpoint or weights, as for `ocelli export --checkpoint`. `module.preprocessing` has mean, std,
    size, crop share and interpolation. Needs torch and timm. `flags` are passed to `ocelli export`, such as
    `"--network", "student"`.
    """
    import timm

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "backbone"
        export(path, out, "--backbone-only", *flags, format="timm")
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


def embed(path, images, *flags, show_progress=True):
    """Returns the features of `images`, `[N, D]` float32, and their names in the same order.

    `path` is a run, a checkpoint or weights, as for `load`. `images` is a folder, a list file or shards, where a folder
    with images in it or below it is images, even if it also holds shards, which is warned of; or it is a sequence
    of paths of images, of arrays `[H, W, 3]` of uint8 or of images of PIL; or one array `[N, H, W, 3]`. Images of PIL
    have 8 bits, or 16 in mode `I;16`. The names of images in memory are their numbers from 0, as text; an image that
    cannot be used has no row and is named by a warning. `flags` are passed to `ocelli embed`, such as `"--patches"`.
    """
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        inputs, names = embed_flags(images, folder)
        out = Path(folder) / "features.npy"
        command = ["embed", "--checkpoint", path, *inputs, "--out", out, "--json", *flags]
        answer = _answer(_run(*command, show_progress=show_progress))
        if answer["left_out"]:
            left_out = names_for_user(answer["left_out"], names, folder)
            warnings.warn(left_out_in_words(left_out, answer["flaws"]), stacklevel=2)
        rows = [json.loads(row) for row in Path(f"{out}.rows.jsonl").read_text().splitlines()]
        found = [row.get("name", row.get("key")) for row in rows]
        return np.load(out), names_for_user(found, names, folder)


def probe(path, train, test, *flags, protocols=(), baseline=False, show_progress=True):
    """Scores the features of `path` with labels, and returns everything that `ocelli probe --json` prints.

    `train` and `test` are folders with one sub-folder per class, or shards, or lists of them; `train` is None with
    `"--leave-one-out"` or `"--label-free"` among the `flags`. `protocols` are names such as `"knn"`; `baseline` also
    scores a random network and raw pixels. `probe(…)["networks"]` has the scores of each network by its name, which
    depends on the method, such as `["student"]["knn_20"]["accuracy"]` in percent.
    """
    command = ["probe", "--checkpoint", path, "--test", *paths_of(test, "test"), "--json", *flags]
    if train is not None:
        command += ["--train", *paths_of(train, "train")]
    protocols = [protocols] if isinstance(protocols, str) else protocols
    if protocols:
        command += ["--protocol", ",".join(protocols)]
    if baseline:
        command.append("--baseline")
    return _answer(_run(*command, show_progress=show_progress))


def export(path, out, *flags, format=None, precision=None, overwrite=False, show_progress=False):
    """Writes the backbone of `path`, with its classifier if it has one, to `out` for another library, with a model
    card; returns the paths of the files. `"--backbone-only"` among the `flags` leaves the classifier out.

    `format` is `"timm"`, `"torchvision"`, `"transformers"`, `"dinov2"`, `"dinov3"`, `"onnx"` or `"safetensors"`; None
    takes it from the extension of `out`. `precision` is `"f32"`, `"f16"`, `"bf16"` or, for ONNX, `"int8"`.
    """
    command = ["export", "--checkpoint", path, "--out", out, "--json", *flags]
    if format is not None:
        command += ["--format", format]
    if precision is not None:
        command += ["--precision", precision]
    if overwrite:
        command.append("--overwrite")
    return [Path(file) for file in _answer(_run(*command, show_progress=show_progress))["files"]]


def report(workdirs=(), *flags, checkpoint=None, images=None, out=None, overwrite=False, show_progress=True):
    """Writes one HTML page about a run, about several side by side, or about weights, and returns its path.

    `workdirs` is a run or a list of them, whose page shows their own images or `images`. The page of one run is
    `report.html` in its work directory, unless `out` is given. Without `workdirs`, the page shows `images` by the
    weights `checkpoint`, as for `load`; `out` is then the folder for the page and its pictures, and `overwrite`
    replaces those of an earlier report.
    """
    command = ["report", *paths_of(workdirs, "workdirs")]
    if checkpoint is not None:
        command += ["--checkpoint", checkpoint]
    if images is not None:
        command += ["--images", *paths_of(images, "images")]
    if out is not None:
        command += ["--out", out]
    if overwrite:
        command.append("--overwrite")
    answer = _answer(_run(*command, "--json", *flags, show_progress=show_progress))
    # Of weights, the page is the first of several files.
    return Path(answer["file"] if "file" in answer else answer["files"][0])


class Runs(list):
    """Runs, as a list of dictionaries. `str(runs)` is the table of `ocelli runs`; a notebook shows it as HTML.

    `pandas.DataFrame(runs)` is the same as a data frame.
    """

    #: Columns of the table: a heading, and the key of the dictionaries or of `_shown`.
    _COLUMNS = (
        ("run", "workdir"),
        ("method", "method"),
        ("backbone", "backbone"),
        ("step", "step"),
        ("of", "total_steps"),
        ("loss", "loss"),
        ("score: first → best → last", "score"),
        ("state", "state"),
    )

    def _rows(self):
        rows = [[heading for heading, _ in self._COLUMNS]]
        for run in self:
            shown = _shown(run)
            rows.append([_cell(shown.get(key)) for _, key in self._COLUMNS])
        return rows

    def __str__(self):
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def _repr_html_(self):
        import html

        lines = []
        for i, row in enumerate(self._rows()):
            tag = "td" if i else "th"
            lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
        return "<table>" + "".join(lines) + "</table>"


def _shown(run):
    """Returns a run with its `score`, or else its search of views, as text; its state may be an error."""
    shown = {"state": run.get("error"), **run}
    best = run.get("best")
    learning = run.get("learning")
    if best is not None:
        shown["score"] = f"{best['metric']} {best['course']}"
    elif learning is not None:
        shown["score"] = f"views {learning['course']}"
    return shown


def _cell(value):
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def runs(folder):
    """Returns the runs below `folder` as `Runs`: a list of dictionaries that is printed as a table.

    A dictionary has the keys of `ocelli runs --json`: workdir, name, method, backbone, step, total_steps, loss, best,
    learning, state and more; or workdir and error for a run of another release. The table shows the search of views,
    `learning`, of a run without the score of a probe.
    """
    return Runs(_answer(_run("runs", folder, "--json")))


def seed_table(folder, format=None):
    """Returns the mean and deviation over seeds of the scores of the runs below `folder`.

    Runs that differ only in their seed are one row. Without `format`, the result is the dictionary of
    `ocelli runs --table --json`; with `"text"`, `"csv"` or `"latex"` it is the table as text.
    """
    if format is None:
        return _answer(_run("runs", folder, "--table", "--json"))
    return _run("runs", folder, "--table", "--format", format)
