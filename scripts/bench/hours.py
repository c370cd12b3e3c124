"""Evidence for `--hours`: what the choice without a recipe scores beside its neighbors in the table, and how near runs come to their time.

For every number of minutes, `ocelli plan --hours` names the choice for the images and this machine; it, the candidate before it and the
one after it are run for that time (`optim.length.minutes`) from random weights, on a CPU. Each is scored by k-NN (20) and an honest linear
probe, images resized to the size of its network. The time that a run took, from its start to its end, is beside the minutes it was given.

    python scripts/bench/hours.py --ocelli target/release/ocelli --train 'cifar/train-*.tar' --test 'cifar/test-*.tar' \\
        --workdir runs/hours --minutes 5 15 60

Takes three times the sum of the minutes, and some minutes for scores: four hours for those above, on an otherwise idle machine.
--choice runs others, each a recipe with its settings, separated by spaces: --choice 'lejepa_cifar' --choice 'dino_cifar optim.lr=2e-3'.
Results are in hours.jsonl and, as a table, in hours.md. A run that was stopped goes on, but then has no time.
"""

import argparse
import hashlib
import pathlib
import shlex

import measure

# The candidates from random weights without a GPU, from the cheapest on, as in session/src/advice/table.rs.
CANDIDATES = [
    "lejepa_cifar",
    "lejepa_cifar model.image_px=64 views.crops.0.size_px=64 views.crops.1.size_px=32",
    "lejepa_cifar model.image_px=64 model.width=192 model.depth=12 model.heads=3 model.init_std=0.07 views.crops.0.size_px=64"
    " views.crops.1.size_px=32",
    "lejepa_vits8_imagenette optim.warmup={percent=1} optim.precision.compute=f32 optim.batch_size=64",
    "lejepa_vits16 optim.warmup={percent=1} optim.batch_size=32",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli")
    parser.add_argument("--train", required=True, help="labeled shards, a pattern, or a folder of images with a subfolder for each class")
    parser.add_argument("--test", required=True, help="the same to test on")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", nargs="+", type=float, default=[5.0, 15.0])
    parser.add_argument("--choice", action="append", help="a recipe and its settings, instead of the table's choice and its neighbors")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    rows = measure.Rows(args.workdir / "hours.jsonl", {"train": args.train, "test": args.test})
    for minutes in args.minutes:
        choices = args.choice or neighbors(choice_of_program(args, rows, minutes))
        for seed in args.seeds:
            for choice in choices:
                key = {"part": "run", "minutes": minutes, "choice": choice, "seed": seed}
                if rows.find(**key) is None:
                    rows.add(key | measure_run(args, minutes, choice, seed))
    measure.publish(args.workdir / "hours.md", report(args, rows))


def choice_of_program(args: argparse.Namespace, rows: measure.Rows, minutes: float) -> str:
    """The candidate that the program chooses for so many minutes. It is recorded, because another measurement may choose another one."""
    row = rows.find(part="choice", minutes=minutes)
    if row is None:
        log = args.workdir / "plan.log"
        advice = measure.run([args.ocelli, "plan", "--hours", minutes / 60, "--shards", args.train, "--json"], log)
        row = {"part": "choice", "minutes": minutes, "choice": candidate_of(advice["recipe"], advice["settings"])}
        rows.add(row)
    return row["choice"]


def candidate_of(recipe: str, settings: list[str]) -> str:
    """The candidate with this recipe and, of those whose settings are all among `settings`, with the most of them."""
    best, most = None, -1
    for candidate in CANDIDATES:
        name, *own = candidate.split()
        if name == recipe and set(own) <= set(settings) and len(own) > most:
            best, most = candidate, len(own)
    if best is None:
        raise SystemExit(f"no candidate here is {recipe} with {settings}: the table of the program has others")
    # The program makes batches no larger than a small set; with anything else, it has chosen another run.
    unknown = [entry for entry in settings if entry not in best.split() and not entry.startswith("optim.batch_size=")]
    if unknown:
        raise SystemExit(f"no candidate here is {recipe} with {' '.join(unknown)}: the table of the program has others")
    return best


def neighbors(chosen: str) -> list[str]:
    """Three candidates: the one before the chosen one, it, and the one after it; at an end of the table, the nearest two."""
    middle = min(max(CANDIDATES.index(chosen), 1), len(CANDIDATES) - 2)
    return CANDIDATES[middle - 1 : middle + 2]


def measure_run(args: argparse.Namespace, minutes: float, choice: str, seed: int) -> dict:
    recipe, *settings = shlex.split(choice)
    # Settings are too long for the name of a folder.
    digest = hashlib.sha256(choice.encode()).hexdigest()[:6]
    workdir = args.workdir / f"{minutes:g}-{recipe}-{digest}-{seed}"
    settings += [f"seed={seed}", f"optim.length={{minutes={minutes}}}"]
    run = measure.train(args.ocelli, "pretrain", workdir, settings, "--recipe", recipe, "--shards", args.train)
    px = measure.plan_number(workdir, "image_px")
    return run | measure.probe(args.ocelli, workdir, args.train, args.test, measure.log_of(workdir), "--resize-px", px)


def report(args: argparse.Namespace, rows: measure.Rows) -> str:
    header = ["minutes", "choice", "", "steps", "passes", "took, s", "of its time", "k-NN (20)", "linear"]
    body = []
    for minutes in args.minutes:
        chosen = rows.find(part="choice", minutes=minutes)
        for choice in dict.fromkeys(row["choice"] for row in rows.find_all(part="run", minutes=minutes)):
            runs = rows.find_all(part="run", minutes=minutes, choice=choice)
            shares = [{"share": None if run["wall_s"] is None else run["wall_s"] / (60 * minutes)} for run in runs]
            body.append([
                f"{minutes:g}",
                f"`{choice}`",
                "chosen" if chosen is not None and chosen["choice"] == choice else "",
                measure.listed(runs, "steps", "{:,}"),
                measure.listed(runs, "passes"),
                measure.listed(runs, "wall_s", "{:.0f}"),
                measure.listed(shares, "share", "{:.0%}"),
                measure.listed(runs, "knn"),
                measure.listed(runs, "linear"),
            ])
    about = f"{args.train}; seeds {', '.join(str(seed) for seed in args.seeds)}"
    return "\n\n".join([about, measure.table(header, body), measure.machine(args.ocelli)])


if __name__ == "__main__":
    main()
