"""How few images are enough: pretraining on 300 to 10,000 images, from random weights and from weights of other images.

The images to learn are those of one half of the classes of --train, and the others those of the other half; with --other, they are all
images of --train, and the others those of another set. A network is pretrained on the others first (`lejepa_cifar`, --weights-minutes).
Then, for every number of images and every seed, which also draws the images, and for the same time or number of steps each:

    from random weights   LeJEPA as in `lejepa_cifar`
    continued             from those weights, as `--hours` without a recipe continues weights of this size (`dinov2_cifar`)
    distilled             those weights into the same network with random weights, with the views and the optimizer of `lejepa_cifar`

All networks are that of `lejepa_cifar`, for images of --px pixels, which is 32. Each is scored by k-NN (20) and an honest linear probe, which
are fitted on all images to learn, with their labels, and tested on those of --test: the same two sets for every run. The weights as they are and
random weights are scored once.

    python scripts/bench/small.py --ocelli target/release/ocelli --train 'cifar/train-*.tar' --test 'cifar/test-*.tar' --workdir runs/small

With the defaults these are 24 runs of 90 s and one of ten minutes: about an hour on two cores, with the scores. --minutes 0.2
--weights-minutes 0.5 shows in ten minutes that all of it works. Results are in small.jsonl and, as tables, in small.md; a call that was
stopped goes on where it was. Numbers of images that the set does not have are left out. Shards of large images are read faster after
`ocelli shards resize`.
"""

import argparse
import glob
import json
import os
import pathlib
import tarfile

import measure

KINDS = ["from random weights", "continued", "distilled"]

# As the choice without a recipe continues weights of small images (session/src/advice/table.rs).
CONTINUED = [
    "model=from_init",
    "method.freeze_last_layer={percent=5}",
    "optim.freeze_backbone={percent=5}",
    "optim.layer_decay=0.9",
    "optim.lr=2e-3",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli")
    parser.add_argument("--train", required=True, help="labeled shards, a pattern, or a folder of images with a subfolder for each class")
    parser.add_argument("--test", required=True, help="the same to test on")
    parser.add_argument("--other", help="images that the weights are of, instead of a half of the classes")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--images", nargs="+", type=int, default=[300, 1000, 3000, 10_000])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--minutes", type=float, default=1.5, help="of each run")
    parser.add_argument("--steps", type=int, help="of each run, instead of minutes")
    parser.add_argument("--weights-minutes", type=float, default=10.0, help="of the run whose weights are continued and distilled")
    parser.add_argument("--px", type=int, default=32, choices=[32], help="size of images: 32 is the only one that is measured here")
    args = parser.parse_args()
    length = f"{{steps={args.steps}}}" if args.steps else f"{{minutes={args.minutes}}}"
    settings = {"train": args.train, "test": args.test, "other": args.other, "px": args.px, "length": length}
    rows = measure.Rows(args.workdir / "small.jsonl", settings | {"weights_minutes": args.weights_minutes})
    sets = rows.find(part="sets")
    if sets is None:
        sets = {"part": "sets"} | make_sets(args)
        rows.add(sets)
    weights = args.workdir / "weights"
    if rows.find(part="weights") is None:
        rows.add({"part": "weights"} | train_weights(args, sets, weights))
    for seed in args.seeds:
        for n in args.images:
            missing = [kind for kind in KINDS if rows.find(part="run", kind=kind, images=n, seed=seed) is None]
            few = draw(args, sets, n, seed) if missing else None
            if few is None:
                continue
            for kind in missing:
                workdir = args.workdir / f"{kind.replace(' ', '-')}-{n}-{seed}"
                settings = [f"seed={seed}", f"optim.length={length}"]
                run = train(args, kind, weights, few, workdir, settings) | score(args, sets, workdir)
                rows.add({"part": "run", "kind": kind, "images": n, "seed": seed} | run)
    measure.publish(args.workdir / "small.md", report(args, rows))


def make_sets(args: argparse.Namespace) -> dict:
    """Shards of the images to learn, to test on, and of the others, and a description."""
    folder = args.workdir / "sets"
    train = packed(args.ocelli, args.train, folder / "packed")
    test = packed(args.ocelli, args.test, folder / "packed-test", *class_flags(folder / "packed"))
    if args.other:
        return {"train": train, "test": test, "other": args.other, "about": f"the weights are of other images: {args.other}"}
    classes = classes_of(train)
    if len(classes) < 4:
        raise SystemExit(f"{args.train}: {len(classes)} classes in .cls members, and halves need four: name other images with --other")
    learned, other = classes[: len(classes) // 2], classes[len(classes) // 2 :]
    return {
        "train": subset(args.ocelli, train, folder / "learned", "train", learned),
        "test": subset(args.ocelli, test, folder / "learned-test", "test", learned),
        "other": subset(args.ocelli, train, folder / "other", "train", other),
        "about": f"learned and tested are classes {', '.join(learned)}; the weights are of classes {', '.join(other)}",
    }


def packed(ocelli: str, images: str, out: pathlib.Path, *flags: str) -> str:
    """Packs a folder of images into shards; shards, or a folder of them, are taken as they are."""
    if not os.path.isdir(images):
        return images
    if glob.glob(os.path.join(images, "*.tar")):
        return os.path.join(images, "*.tar")
    measure.run([ocelli, "shards", "pack", images, "--out", out, *flags, "--json"], measure.log_of(out))
    return f"{out}/*.tar"


def class_flags(trained: pathlib.Path) -> list[str]:
    """The flag with which the images to test on get the numbers of classes of those to train on, if these were packed."""
    names = trained / "classes.txt"
    return ["--classes", str(names)] if names.exists() else []


def classes_of(shards: str) -> list[str]:
    """Classes in the .cls members of shards: numbers by value, then words."""
    found = set()
    for path in sorted(glob.glob(shards)):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".cls"):
                    found.add(tar.extractfile(member).read().decode().strip())
    # Images without a class.
    found.discard("-1")
    numbers = sorted((text for text in found if text.isdigit()), key=int)
    return numbers + sorted(found - set(numbers))


def subset(ocelli: str, shards: str, out: pathlib.Path, prefix: str, classes: list[str]) -> str:
    command = [ocelli, "shards", "subset", shards, "--out", out, "--prefix", prefix, "--classes", ",".join(classes), "--json"]
    measure.run(command, measure.log_of(out))
    return f"{out}/{prefix}-*.tar"


def size_settings(px: int) -> list[str]:
    """Settings of views of --px pixels and of half of that."""
    return [f"views.crops.0.size_px={px}", f"views.crops.1.size_px={px // 2}"]


def train_weights(args: argparse.Namespace, sets: dict, weights: pathlib.Path) -> dict:
    """Pretrains on the other images, and scores the result as it is and random weights."""
    settings = [f"model.image_px={args.px}", *size_settings(args.px), f"optim.length={{minutes={args.weights_minutes}}}"]
    run = measure.train(args.ocelli, "pretrain", weights, settings, "--recipe", "lejepa_cifar", "--shards", sets["other"])
    return run | score(args, sets, weights, "--baseline")


def score(args: argparse.Namespace, sets: dict, checkpoint: pathlib.Path, *flags: str) -> dict:
    log = measure.log_of(checkpoint)
    return measure.probe(args.ocelli, checkpoint, sets["train"], sets["test"], log, "--resize-px", args.px, *flags)


def draw(args: argparse.Namespace, sets: dict, n: int, seed: int):
    """Draws `n` of the images to learn. Returns their shards, or None if there are fewer images."""
    few = args.workdir / "sets" / f"{n}-{seed}"
    command = [args.ocelli, "shards", "subset", sets["train"], "--out", few, "--count", n, "--seed", seed, "--json"]
    drawn = measure.run(command, measure.log_of(few))["train"]["samples"]
    if drawn < n:
        wanted = n if args.other else 2 * n
        halves = "" if args.other else ", of which half of the classes are learned"
        print(f"left out: there are {drawn:,} images to learn, fewer than {n:,}: this needs a set of {wanted:,} in --train{halves}")
        return None
    return f"{few}/*.tar"


def train(args: argparse.Namespace, kind: str, weights: pathlib.Path, few: str, workdir: pathlib.Path, settings: list[str]) -> dict:
    """Trains on the images `few`."""
    recipe, own, flags = "lejepa_cifar", [f"model.image_px={args.px}", *size_settings(args.px)], []
    if kind == "continued":
        recipe, own, flags = "dinov2_cifar", [*CONTINUED, *size_settings(args.px)], ["--init", weights]
    if kind == "distilled":
        # A string is written in TOML as in JSON.
        teacher = json.dumps(str(weights))
        own.append(f'method={{name="distillation", teacher={{weights={teacher}}}}}')
    return measure.train(args.ocelli, "pretrain", workdir, [*own, *settings], "--recipe", recipe, "--shards", few, *flags)


def report(args: argparse.Namespace, rows: measure.Rows) -> str:
    sets, weights = rows.find(part="sets"), rows.find(part="weights")
    header = ["images", "passes, mean of the seeds", *[f"{kind}: {what}" for kind in KINDS for what in ("k-NN (20)", "linear")]]
    body = []
    for n in args.images:
        passes, cells = [], []
        for kind in KINDS:
            runs = rows.find_all(part="run", kind=kind, images=n)
            passes.append(f"{sum(run['passes'] for run in runs) / len(runs):.0f}" if runs else "-")
            cells += [measure.listed(runs, "knn"), measure.listed(runs, "linear")]
        body.append([f"{n:,}", ", ".join(passes), *cells])
    as_they_are = [
        ["the weights as they are", f"{weights['knn']:.1f}", f"{weights['linear']:.1f}"],
        ["random weights", f"{weights['random_knn']:.1f}", f"{weights['random_linear']:.1f}"],
    ]
    seeds = ", ".join(str(seed) for seed in args.seeds)
    length = f"{args.steps:,} steps" if args.steps else f"{args.minutes:g} minutes"
    about = f"{sets['about']}; {args.px} px; runs of {length}, weights of {args.weights_minutes:g} minutes; seeds {seeds}"
    parts = [about, measure.table(header, body), measure.table(["", "k-NN (20)", "linear"], as_they_are), measure.machine(args.ocelli)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
