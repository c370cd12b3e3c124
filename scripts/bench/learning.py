"""Rank correlation of the search of views (`views/retrieval`) with k-NN accuracy, over runs of several methods.

Each run is scored by both at the same steps. Printed are Spearman's correlation over the ends of all runs, over those of
each method, and the mean over runs of that over the course of a run.

    python scripts/bench/learning.py --ocelli target/release/ocelli --shards 'cifar/train-*.tar' --train 'cifar/train-000000.tar' \\
        --test 'cifar/test-*.tar' --workdir runs/learning [--recipes dino_cifar lejepa_cifar dinov2_cifar] [--rates 0.1 0.3 1 3] [--steps 300]

A run that is in the folder already is read, not repeated.
"""

import argparse
import json
import pathlib
import re
import subprocess

LEARNING_RATE = re.compile(r"^lr = (\S+)", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli")
    parser.add_argument("--recipes", nargs="*", default=["dino_cifar", "lejepa_cifar", "dinov2_cifar"])
    parser.add_argument("--rates", nargs="*", type=float, default=[0.1, 0.3, 1.0, 3.0], help="multiples of the recipe's learning rate")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--points", type=int, default=4, help="scores of a run")
    parser.add_argument("--images", type=int, default=512, help="images whose views are searched")
    parser.add_argument("--shards", nargs="+", required=True)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--test", nargs="+", required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    args = parser.parse_args()
    runs = []
    for recipe in args.recipes:
        for rate in args.rates:
            workdir = args.workdir / f"{recipe}-{rate:g}"
            if not (workdir / "report.html").exists():
                train(args, recipe, rate, workdir)
            points = scored(workdir)
            runs.append((recipe, points))
            course = "  ".join(f"{step}: {views:.1f} / {knn:.1f}" for step, views, knn in points)
            print(f"{recipe} lr x {rate:g}   views / k-NN   {course}", flush=True)
    print(f"\nover the ends of {len(runs)} runs: {correlation([points[-1] for _, points in runs]):.2f}")
    for recipe in args.recipes:
        ends = [points[-1] for name, points in runs if name == recipe]
        print(f"over the ends of {len(ends)} runs of {recipe}: {correlation(ends):.2f}")
    courses = [correlation(points) for _, points in runs]
    print(f"over the course of a run, mean of {len(courses)}: {sum(courses) / len(courses):.2f}")


def train(args: argparse.Namespace, recipe: str, rate: float, workdir: pathlib.Path) -> None:
    text = subprocess.run([args.ocelli, "recipe", "show", recipe], capture_output=True, text=True, check=True).stdout
    lr = float(LEARNING_RATE.search(text).group(1)) * rate
    settings = [
        f"optim.lr={lr}",
        f"optim.length={{steps={args.steps}}}",
        f"run.probe_every_steps={args.steps // args.points}",
        f"run.retrieval_images={args.images}",
    ]
    command = [args.ocelli, "--quiet", "pretrain", "--recipe", recipe, "--workdir", str(workdir), "--shards", *args.shards]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run([*command, "--probe-train", *args.train, "--probe-test", *args.test], check=True)


def scored(workdir: pathlib.Path) -> list[tuple[int, float, float]]:
    """Steps of a run with the percentage of views that are found, and the k-NN accuracy."""
    rows = [json.loads(line) for line in (workdir / "evaluations.jsonl").read_text().splitlines()]
    views = {row["about"]["step"]: row["value"] for row in rows if row["metric"] == "retrieval" and row["about"]["network"] != "random weights"}
    knn = {row["about"]["step"]: row["accuracy"] for row in rows if row["metric"] == "knn_20"}
    return [(step, views[step], knn[step]) for step in sorted(views.keys() & knn.keys())]


def correlation(points: list[tuple[int, float, float]]) -> float:
    """Spearman's rank correlation of the second and the third number; ties have their mean rank."""
    a = ranks([point[1] for point in points])
    b = ranks([point[2] for point in points])
    mean = (len(points) - 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    variance_a = sum((x - mean) ** 2 for x in a)
    variance_b = sum((y - mean) ** 2 for y in b)
    return covariance / (variance_a * variance_b) ** 0.5 if variance_a * variance_b > 0 else float("nan")


def ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


if __name__ == "__main__":
    main()
