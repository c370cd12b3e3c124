"""Memory of the process of a run beside what `ocelli plan` and the note at its start say, for five recipes.

Each run takes a few steps with a checkpoint in between, draws its pictures and ends; its peak is what the kernel counted
for the process. Images are made if none are given. Takes a few minutes on two cores, on an otherwise idle machine.

    python scripts/bench/resident.py --ocelli target/release/ocelli [--recipes simclr_cifar ...] [--steps 8] [--shards 'cifar/train-*.tar']
    python scripts/bench/resident.py --ocelli target/release/ocelli --probe     # with a probe before the last step

The last line is the largest deviation from the plan. `UNUSED_SHARE` in session/src/resident.rs, what the allocator keeps
beside what is in use, is set so that it is below 10 %; the column `share` is what it would have to be for each recipe.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

RECIPES = ["quickstart", "lejepa_cifar", "dino_cifar", "dinov2_cifar", "simclr_cifar"]
UNUSED_SHARE = re.compile(r"const UNUSED_SHARE: f64 = ([0-9.]+);")
SAID = re.compile(r"needs about ([0-9.]+) of ([0-9.]+) GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shards", nargs="*", help="instead of 2,000 images of 48 px that are made")
    parser.add_argument("--probe", action="store_true", help="scores the images by nearest neighbors in the middle and at the end")
    args = parser.parse_args()
    source = pathlib.Path(__file__).parents[2] / "session/src/resident.rs"
    unused_share = float(UNUSED_SHARE.search(source.read_text()).group(1))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        shards = args.shards or made_images(args.ocelli, folder)
        print("| recipe | plan, GB | note, GB | process, GB | process / plan | share |")
        print("|---|---|---|---|---|---|", flush=True)
        worst = 0.0
        for recipe in args.recipes:
            row = planned(args.ocelli, recipe)
            said, resident = measured(args, recipe, shards, folder / f"run-{recipe}")
            ratio = resident / row["process_bytes"]
            # Of the plan's sum, a share of what is in use belongs to the allocator.
            in_use = row["process_bytes"] - unused_bytes(row, unused_share)
            counted = row["peak_bytes"] + row["checkpoint_bytes"]
            share = (resident - in_use) / counted
            print(
                f"| {recipe} | {row['process_bytes'] / 1e9:.3f} | {said:.2f} | {resident / 1e9:.3f} | {ratio:.2f} | {share:.2f} |",
                flush=True,
            )
            worst = max(worst, abs(ratio - 1))
    print(f"\nlargest deviation from the plan: {100 * worst:.0f} %")


def made_images(ocelli: str, folder: pathlib.Path) -> list[str]:
    out = folder / "data"
    subprocess.run([ocelli, "shards", "synth", "--out", out, "--count", "2000", "--size-px", "48", "--quiet"], check=True)
    return sorted(str(path) for path in out.glob("*.tar"))


def planned(ocelli: str, recipe: str) -> dict:
    """The only row of a plan for one process on this machine."""
    command = [ocelli, "plan", "--recipe", recipe, "--images", "2000", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])["rows"][0]


def unused_bytes(row: dict, unused_share: float) -> float:
    return unused_share * (row["peak_bytes"] + row["checkpoint_bytes"])


def measured(args, recipe: str, shards: list[str], workdir: pathlib.Path) -> tuple[float, float]:
    """Gigabytes that the note of a run says it needs, and the most bytes that its process held."""
    command = [args.ocelli, "pretrain", "--recipe", recipe, "--shards", *shards, "--workdir", str(workdir)]
    command += ["--set", f"optim.length={{steps={args.steps}}}", "--set", f"run.checkpoint_every_steps={args.steps // 2}"]
    if args.probe:
        command += ["--probe-train", *shards, "--probe-test", *shards]
        command += ["--set", f"run.probe_every_steps={args.steps // 2}"]
    log = workdir.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
    text = log.read_text()
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{' '.join(command)}: {text}")
    said = SAID.search(text)
    if said is None:
        sys.exit(f"no memory in the log of {recipe}: {text}")
    # Linux counts kilobytes.
    return float(said.group(1)), 1024.0 * usage.ru_maxrss


if __name__ == "__main__":
    main()
