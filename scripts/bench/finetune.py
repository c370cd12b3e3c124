"""Fine-tuning: what pretraining without labels is worth when there are labels, and the same fine-tuning in PyTorch.

For every seed, on the same cores:

    pretrained    LeJEPA (`lejepa_cifar`) for --pretrain-minutes, then `ocelli finetune` with the recipe `finetune` for --finetune-minutes
    from labels   `ocelli finetune` with the recipe `classify_cifar`, from random weights, for the sum of both
    PyTorch       peer_finetune.py: the weights of the first, exported for timm, fine-tuned as timm's training script does, for as many steps

All use the network of `lejepa_cifar` for images of --px pixels, and mix images (mixup, cutmix), smooth labels and erase boxes as the recipe
`finetune` does; --no-mix turns mixup and cutmix off everywhere, for runs that are too short for them. --set changes the recipe `finetune`,
and PyTorch follows it. The score is the top-1 accuracy on all images of --test, of one crop each. --labeled names a part of the images
with which classifiers are trained; pretraining takes those of --train in any case.

    python scripts/bench/finetune.py --ocelli target/release/ocelli --python .venv/bin/python --train 'cifar/train-*.tar' \\
        --test 'cifar/test-*.tar' --workdir runs/finetune --pretrain-minutes 10 --finetune-minutes 5

Takes about 40 minutes for each seed with these, on an otherwise idle machine: the two kinds of run of Ocelli, and PyTorch's, which is as
long as its speed makes it. Results are in finetune.jsonl and, as a table, in finetune.md. A run of Ocelli that was stopped goes on, but
then has no time; one of PyTorch starts over. --python needs torch, torchvision and timm.
"""

import argparse
import pathlib
import sys

import measure

HERE = pathlib.Path(__file__).parent

# What the recipe `finetune` has, for the recipe that has none of it.
REGULARIZATION = ["method.mixup=0.8", "method.cutmix=1.0", "method.smoothing=0.1", "views.crops.0.erase={p=0.25}"]
NO_MIX = ["method.mixup=0", "method.cutmix=0"]
# Validates after the last step alone, as PyTorch's side does: by default, `ocelli finetune` validates eight times within its minutes.
VALIDATE_ONCE = "run.probe_every_steps=1000000000"
KINDS = ["pretrained", "from labels", "PyTorch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch, torchvision and timm")
    parser.add_argument("--train", required=True, help="labeled shards, a pattern, or a folder of images with a subfolder for each class")
    parser.add_argument("--labeled", help="the same to train classifiers on, instead of those of --train")
    parser.add_argument("--test", required=True, help="the same to test on")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--px", type=int, default=32, choices=[32, 64])
    parser.add_argument("--pretrain-minutes", type=float, default=10.0)
    parser.add_argument("--finetune-minutes", type=float, default=5.0)
    parser.add_argument("--no-mix", action="store_true", help="no mixup and no cutmix")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the recipe `finetune`; can be repeated")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    args = parser.parse_args()
    args.labeled = args.labeled or args.train
    shared = ["train", "labeled", "test", "px", "pretrain_minutes", "finetune_minutes", "no_mix", "set"]
    rows = measure.Rows(args.workdir / "finetune.jsonl", {key: getattr(args, key) for key in shared})
    for seed in args.seeds:
        for kind in KINDS:
            if rows.find(kind=kind, seed=seed) is None:
                rows.add({"kind": kind, "seed": seed} | RUNS[kind](args, seed))
    measure.publish(args.workdir / "finetune.md", report(args, rows))


def folder(args: argparse.Namespace, name: str, seed: int) -> pathlib.Path:
    return args.workdir / f"{name}-{seed}"


def mix_settings(args: argparse.Namespace) -> list[str]:
    return NO_MIX if args.no_mix else []


def labeled_flags(args: argparse.Namespace, recipe: str) -> list[str]:
    return ["--recipe", recipe, "--shards", args.labeled, "--val-shards", args.test]


def pretrained(args: argparse.Namespace, seed: int) -> dict:
    """Pretrains without labels and fine-tunes; the time is that of both."""
    views = [f"views.crops.0.size_px={args.px}", f"views.crops.1.size_px={args.px // 2}"]
    settings = [f"model.image_px={args.px}", *views, f"seed={seed}", f"optim.length={{minutes={args.pretrain_minutes}}}"]
    weights = folder(args, "weights", seed)
    first = measure.train(args.ocelli, "pretrain", weights, settings, "--recipe", "lejepa_cifar", "--shards", args.train)
    settings = [VALIDATE_ONCE, *mix_settings(args), *args.set, f"seed={seed}", f"optim.length={{minutes={args.finetune_minutes}}}"]
    flags = ["--checkpoint", weights, *labeled_flags(args, "finetune")]
    row = measure.train(args.ocelli, "finetune", folder(args, "pretrained", seed), settings, *flags)
    row["finetune_s"] = row["wall_s"]
    if None not in (first["wall_s"], row["wall_s"]):
        row["wall_s"] += first["wall_s"]
    else:
        row["wall_s"] = None
    return row


def from_labels(args: argparse.Namespace, seed: int) -> dict:
    """Trains a classifier from random weights for the time of pretraining and fine-tuning."""
    minutes = args.pretrain_minutes + args.finetune_minutes
    size = [f"model.image_px={args.px}", f"views.crops.0.size_px={args.px}"]
    settings = [VALIDATE_ONCE, *size, *REGULARIZATION, *mix_settings(args), f"seed={seed}", f"optim.length={{minutes={minutes}}}"]
    return measure.train(args.ocelli, "finetune", folder(args, "from-labels", seed), settings, *labeled_flags(args, "classify_cifar"))


def in_pytorch(args: argparse.Namespace, seed: int) -> dict:
    """Fine-tunes the weights of `pretrained` in PyTorch, with the settings of its plan and for its steps."""
    exported = folder(args, "timm", seed)
    log = folder(args, "timm", seed).with_name(f"timm-{seed}.log")
    command = [args.ocelli, "export", "--checkpoint", folder(args, "weights", seed), "--format", "timm", "--out", exported]
    measure.run([*command, "--overwrite", "--json"], log)
    command = [args.python, HERE / "peer_finetune.py", "--run", folder(args, "pretrained", seed), "--weights", exported]
    # As Ocelli, which uses all cores for steps and for images.
    command += ["--threads", measure.n_cores(), "--workers", measure.n_cores()]
    row = measure.run([*command, "--train", args.labeled, "--test", args.test], log)
    return row | {"finetune_s": row["wall_s"], "wall_s": None}


RUNS = {"pretrained": pretrained, "from labels": from_labels, "PyTorch": in_pytorch}


def report(args: argparse.Namespace, rows: measure.Rows) -> str:
    words = {
        "pretrained": f"LeJEPA for {args.pretrain_minutes:g} minutes, then fine-tuned for {args.finetune_minutes:g}",
        "from labels": f"from random weights for {args.pretrain_minutes + args.finetune_minutes:g} minutes",
        "PyTorch": "the same weights of LeJEPA, fine-tuned by timm and PyTorch for as many steps",
    }
    header = ["", "passes with labels", "seconds in all", "of these, fine-tuning", "top-1"]
    body = []
    for kind in KINDS:
        runs = rows.find_all(kind=kind)
        seconds = [measure.listed(runs, key, "{:.0f}") for key in ("wall_s", "finetune_s")]
        body.append([words[kind], measure.listed(runs, "passes"), *seconds, measure.listed(runs, "top1")])
    mixed = "without mixup and cutmix" if args.no_mix else "with mixup and cutmix"
    about = f"{args.labeled}, {args.px} px, {mixed}; seeds {', '.join(str(seed) for seed in args.seeds)}"
    if args.set:
        about += f"; {', '.join(args.set)}"
    return "\n\n".join([about, measure.table(header, body), measure.machine(args.ocelli)])


if __name__ == "__main__":
    main()
