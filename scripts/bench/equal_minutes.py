"""Equal minutes: LeJEPA and DINO with a ViT-Ti/8 at 64 px in Ocelli and in PyTorch, for the same time on the same cores.

Ocelli's minutes (`optim.length.minutes`) are those from the start of the program to its end, with pictures and report. PyTorch's
(peer_train.py) are those of its steps alone: what it needs to start, to time steps and to score itself comes on top, in its favor. On
both sides the learning rate follows the number of steps that fit, found by timing the first ones. Networks, views, batches and
optimizers are those of `lejepa_cifar` and `dino_cifar` with the settings below. `ocelli probe` scores both networks: k-NN (20) and an
honest linear probe, images resized to 64 px. The sides alternate.

    python scripts/bench/equal_minutes.py --ocelli target/release/ocelli --python .venv/bin/python --train 'cifar/train-*.tar' \\
        --test 'cifar/test-*.tar' --workdir runs/equal --minutes 10

Takes eight times the minutes, and two minutes more for each run: an hour and a half with the defaults, on an otherwise idle machine.
Results are in equal_minutes.jsonl and, as a table, in equal_minutes.md. A run of Ocelli that was stopped goes on, but then has no time;
one of PyTorch starts over. --python needs torch and torchvision.
"""

import argparse
import pathlib
import sys

import measure

HERE = pathlib.Path(__file__).parent
PX = 64
HEADS = 3
SETTINGS = [
    f"model.image_px={PX}",
    "model.width=192",
    "model.depth=12",
    f"model.heads={HEADS}",
    "model.init_std=0.07",
    f"views.crops.0.size_px={PX}",
    f"views.crops.1.size_px={PX // 2}",
]
METHODS = {"lejepa": "LeJEPA", "dino": "DINO"}
SIDES = ["Ocelli", "PyTorch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and torchvision")
    parser.add_argument("--train", required=True, help="labeled shards, a pattern, or a folder of images with a subfolder for each class")
    parser.add_argument("--test", required=True, help="the same to test on")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    args = parser.parse_args()
    settings = {"train": args.train, "test": args.test, "minutes": args.minutes}
    rows = measure.Rows(args.workdir / "equal_minutes.jsonl", settings)
    for seed in args.seeds:
        for method in args.methods:
            for side in SIDES:
                if rows.find(method=method, side=side, seed=seed) is None:
                    row = ours(args, method, seed) if side == "Ocelli" else theirs(args, method, seed)
                    rows.add({"method": method, "side": side, "seed": seed} | row)
    measure.publish(args.workdir / "equal_minutes.md", report(args, rows))


def ours(args: argparse.Namespace, method: str, seed: int) -> dict:
    workdir = args.workdir / f"{method}-{seed}"
    settings = [*SETTINGS, f"seed={seed}", f"optim.length={{minutes={args.minutes}}}"]
    run = measure.train(args.ocelli, "pretrain", workdir, settings, "--recipe", f"{method}_cifar", "--shards", args.train)
    log = measure.log_of(workdir)
    # The score of random weights is that of a network of this form.
    scores = measure.probe(args.ocelli, workdir, args.train, args.test, log, "--resize-px", PX, "--baseline")
    return run | {"steps_s": None} | scores


def theirs(args: argparse.Namespace, method: str, seed: int) -> dict:
    weights = args.workdir / f"{method}-{seed}.pth"
    log = args.workdir / f"{method}-{seed}-torch.log"
    command = [args.python, HERE / "peer_train.py", "--recipe", HERE.parent / "recipes" / f"{method}_cifar.toml"]
    command += [*measure.set_flags(SETTINGS), "--train", args.train, "--test", args.test, "--seed", seed]
    # As Ocelli, which uses all cores for steps and for images.
    command += ["--threads", measure.n_cores(), "--workers", measure.n_cores()]
    run = measure.run([*command, "--minutes", args.minutes, "--out", weights], log)
    run["steps_s"] = run.pop("seconds")
    flags = ["--source", "timm", "--heads", HEADS, "--resize-px", PX]
    return run | measure.probe(args.ocelli, weights, args.train, args.test, log, *flags)


def report(args: argparse.Namespace, rows: measure.Rows) -> str:
    header = ["method", "", "images seen", "seconds in all", "of these, steps", "k-NN (20)", "linear"]
    body = []
    for method in args.methods:
        for side in SIDES:
            runs = rows.find_all(method=method, side=side)
            seconds = [measure.listed(runs, key, "{:.0f}") for key in ("wall_s", "steps_s")]
            seen = measure.listed(runs, "images_seen", "{:,.0f}")
            body.append([METHODS[method], side, seen, *seconds, measure.listed(runs, "knn"), measure.listed(runs, "linear")])
    first = rows.find(side="Ocelli")
    body.append(["random weights", "", "0", "", "", f"{first['random_knn']:.1f}", f"{first['random_linear']:.1f}"])
    seeds = ", ".join(str(seed) for seed in args.seeds)
    about = f"{args.minutes:g} minutes each, ViT-Ti/8 at {PX} px, {args.train}; seeds {seeds}"
    return "\n\n".join([about, measure.table(header, body), measure.machine(args.ocelli)])


if __name__ == "__main__":
    main()
