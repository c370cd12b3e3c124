"""What scripts that measure have in common: commands with the JSON that they print and their seconds, finished parts in a file, and
tables in Markdown. Needs Python alone.

A part of a measurement is a row of a file, so that a script that was stopped goes on with the parts whose rows are missing. Runs of
`ocelli` resume by themselves; a run that was started more than once has no time.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

# Temperature of the votes of nearest neighbors in `ocelli probe`.
TEMPERATURE = 0.07


def run(command: list, log: pathlib.Path) -> dict:
    """Runs a command whose output ends with a line of JSON, and appends messages and output to the file `log`.

    Returns the JSON, with the seconds from the start of the process to its end as `wall_s`.
    """
    words = [str(word) for word in command]
    print("$ " + shlex.join(words), flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("a") as file:
        result = subprocess.run(words, stdout=subprocess.PIPE, stderr=file, text=True)
        wall_s = time.perf_counter() - start
        file.write(result.stdout)
    if result.returncode != 0:
        sys.exit(f"exit code {result.returncode}; the end of {log}:\n{last_lines(log)}")
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"no line of JSON in the output:\n{result.stdout}")
    print(f"  {wall_s:.1f} s", flush=True)
    return json.loads(lines[-1]) | {"wall_s": wall_s}


def last_lines(path: pathlib.Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:])


def log_of(folder: pathlib.Path) -> pathlib.Path:
    """The log beside a folder; its name may contain a number with a point."""
    return folder.parent / f"{folder.name}.log"


def set_flags(settings: list[str]) -> list[str]:
    flags = []
    for setting in settings:
        flags += ["--set", setting]
    return flags


def train(ocelli: str, verb: str, workdir: pathlib.Path, settings: list[str], *flags) -> dict:
    """Runs `ocelli pretrain` or `ocelli finetune` in `workdir`, and resumes a run that is there.

    Returns what it prints, with the images that it has seen and its passes over the set. `wall_s` is None if the run was started more
    than once.
    """
    command = [ocelli, verb, "--workdir", workdir, *flags, *set_flags(settings), "--json"]
    row = run(command, log_of(workdir))
    n_starts = len((workdir / "starts.jsonl").read_text().splitlines())
    if n_starts > 1:
        row["wall_s"] = None
    images = plan_number(workdir, "total_steps") * plan_number(workdir, "batch_size")
    return row | {"images_seen": images, "passes": images / plan_number(workdir, "n_samples")}


def plan_number(workdir: pathlib.Path, key: str) -> int:
    """The first whole number called `key` in the plan of a run, or 0 if it has none.

    Python before 3.11 cannot read TOML. The network of a run comes before all others of its plan.
    """
    found = re.search(rf"^{key} = (\d+)$", (workdir / "plan.toml").read_text(), re.MULTILINE)
    return int(found.group(1)) if found else 0


def probe(ocelli: str, checkpoint, train: str, test: str, log: pathlib.Path, *flags, k: int = 20, temperature: float = TEMPERATURE) -> dict:
    """Scores of `ocelli probe`: k-NN and an honest linear probe, in percent, of the network of `checkpoint`.

    With the flag --baseline also those of random weights, as `random_knn` and `random_linear`.
    """
    command = [ocelli, "probe", "--checkpoint", checkpoint, "--train", train, "--test", test, "--protocol", "knn,linear-honest"]
    command += ["--set", f"knn.k={k}", "--set", f"knn.temperature={temperature}", "--features-gb", "0", "--json"]
    networks = run([*command, *flags], log)["networks"]
    random = networks.pop("random_init", None)
    networks.pop("pixels", None)
    (network,) = networks.values()
    scores = {"knn": network[f"knn_{k}"]["accuracy"], "linear": network["linear_honest"]["accuracy"]}
    if random is not None:
        scores["random_knn"] = random[f"knn_{k}"]["accuracy"]
        scores["random_linear"] = random["linear_honest"]["accuracy"]
    return scores


class Rows:
    """Finished parts of a measurement: rows of JSON in a file, the first of which holds the settings that all of them share."""

    def __init__(self, path: pathlib.Path, settings: dict):
        self.path, self.rows = path, []
        settings = json.loads(json.dumps(settings))
        if path.exists():
            first, *self.rows = [json.loads(line) for line in path.read_text().splitlines()]
            if first != {"settings": settings}:
                sys.exit(f"{path} holds results with other settings, {first['settings']}: choose another --workdir")
        self.settings = settings

    def find_all(self, **values) -> list[dict]:
        """The rows with these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in values.items())]

    def find(self, **values):
        """The first row with these values, or None."""
        return next(iter(self.find_all(**values)), None)

    def add(self, row: dict) -> None:
        """Adds a row. The file is replaced as a whole, so that it has no half of a row."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in [{"settings": self.settings}, *self.rows]))
        os.replace(part, self.path)


def table(header: list[str], rows: list[list]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)


def listed(rows: list[dict], key: str, form: str = "{:.1f}") -> str:
    """Values of `key` in `rows`, one for each seed, or a dash if there are none."""
    values = []
    for row in rows:
        value = row.get(key)
        values.append("-" if value is None else form.format(value))
    return ", ".join(values) or "-"


def publish(path: pathlib.Path, text: str) -> None:
    """Writes `text` to a file and prints it."""
    path.write_text(text + "\n")
    print(f"\n{text}\n\n{path}", flush=True)


def n_cores() -> int:
    """Number of cores that this process, and those that it starts, may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(ocelli: str) -> str:
    """The program's version and this machine's processor."""
    version = subprocess.run([ocelli, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return f"{version}; {n_cores()} cores of {names[0] if names else 'an unknown processor'}"
