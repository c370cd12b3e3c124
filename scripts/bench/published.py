"""Runs whose scores others have published, on a GPU that is there for minutes at a time: ours beside theirs.

A call trains one of the runs below for at most --seconds, which stops it with a checkpoint (SIGTERM), and the next call with the same
--workdir goes on, until the run has all of its epochs; then `ocelli probe` scores it. The script says how many more calls are to be
expected. --epochs makes a run shorter than the published one, and the table says so.

    python scripts/bench/published.py lejepa_imagenette --ocelli target/cuda/release/ocelli --train 'imagenette/train-*.tar' \\
        --test 'imagenette/val-*.tar' --workdir runs/published

lejepa, dino, swav, moco and simclr_imagenette are ViT-S/16 at 224 px on Imagenette for 200 epochs, in batches of 128 or 256, as in
benchmarks/imagenet10 of stable-pretraining (RESULTS.md, one A100). Their scores are the best of the epochs, of probes that are trained
along; ours are of the last checkpoint, by k-NN (20) and an honest linear probe on frozen features. The scripts of LeJEPA and SimCLR are
public, and the settings here are theirs as far as they are keys of a recipe; of the others only what RESULTS.md says is known, and the rest
is that of the recipes here. simclr and swav_cifar are ResNet-18 on all of CIFAR-10 for 200 epochs in batches of 128, as in lightly's
cifar10_benchmark.py; theirs are the best k-NN (200, temperature 0.1) of all epochs, ours those of the last. What else differs is in the
table.

How long they take here is not measured. At 500 images/s, which DINO's step with ten views had on an H200 in an earlier version
(docs/gpus.md), the 1.9 million images of 200 epochs of Imagenette take an hour, and so seven calls of 540 s. Needs Python alone. Results
are in published.jsonl, with a row for each call, and as a table in published.md.
"""

import argparse
import json
import math
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import measure

# After the signal, a run writes its checkpoint.
TO_STOP_S = 60

# Less is not enough to score a run.
TO_SCORE_S = 180

# Exit codes of a run that the signal has stopped, the second before it listens.
STOPPED = [143, -signal.SIGTERM]

STABLE_PRETRAINING = "stable-pretraining, Imagenette, ViT-S/16, 200 epochs: the best of the epochs"
LIGHTLY = "lightly, CIFAR-10, ResNet-18, 200 epochs: the best of the epochs"

# One view is always blurred, the other seldom, and solarized instead.
VIEW = (
    'count=1,size_px=224,scale=[0.08,1.0],interpolation="bilinear",flip_p=0.5,gray_p=0.2,blur_sigma=[0.1,2.0],'
    "jitter={brightness=0.4,contrast=0.4,saturation=0.2,hue=0.1,p=0.8}"
)
TWO_VIEWS = f'views={{preset="custom",crops=[{{{VIEW},blur_p=1.0,solarize_p=0.0}},{{{VIEW},blur_p=0.1,solarize_p=0.2}}]}}'
BF16 = "optim.precision.compute=bf16"
SWAV_HEAD = 'method={name="swav",prototypes=3000,head_hidden=[2048],head_output=128,head_batch_norm=true,freeze_prototypes={epochs=1}}'
SIMCLR_HEAD = 'method={name="simclr",temperature=0.2,head_hidden=[2048,2048],head_output=256,head_batch_norm=true}'
LARS = 'optim={batch_size=256,algorithm="lars",trust=0.02,lr=0.3,lr_scaling="fixed",min_lr=0.0,weight_decay=[1e-4,1e-4]'
ADAM = 'optim={batch_size=128,algorithm="adamw",lr=1e-3,lr_scaling="fixed",min_lr=0.0,weight_decay=[1e-6,1e-6],decay_vectors=true'


class Run:
    """A published run: the recipe that comes nearest, the settings that it changes, their scores and what still differs."""

    def __init__(self, recipe, settings, knn, linear, source, differs, k=20, temperature=measure.TEMPERATURE, probe_flags=()):
        self.recipe, self.settings = recipe, settings
        self.knn, self.linear, self.source, self.differs = knn, linear, source, differs
        self.k, self.temperature, self.probe_flags = k, temperature, probe_flags


RUNS = {
    "lejepa_imagenette": Run(
        "lejepa_vits16",
        [
            *("optim.batch_size=128", "optim.lr=4e-4", "optim.start_lr=4e-6", "optim.min_lr=4e-6", "optim.warmup={epochs=2}"),
            *("views.crops.0.blur_taps=23", "views.crops.1.blur_taps=23", "model.drop_path=0", BF16),
        ],
        85.4,
        87.1,
        STABLE_PRETRAINING,
        "projector as in the recipe here; bf16 instead of f16",
    ),
    "dino_imagenette": Run(
        "dino_vits16",
        ["optim.batch_size=128", "optim.lr=5e-4", "optim.lr_scaling=fixed", "views.n_local=6", BF16],
        83.8,
        86.1,
        STABLE_PRETRAINING,
        "their script is not public: batch, rate and 2 + 6 views as RESULTS.md says, all else as in the recipe here; bf16",
    ),
    "swav_imagenette": Run(
        "dino_vits16",
        [
            *(SWAV_HEAD, "views.n_local=4", "optim.batch_size=128", "optim.lr=5e-4", "optim.lr_scaling=fixed", BF16),
            *("optim.weight_decay=[0.05,0.05]", "model.pos_offset=0", "model.drop_path=0"),
        ],
        86.4,
        89.7,
        STABLE_PRETRAINING,
        "their script is not public: rate and 2 + 4 views as RESULTS.md says; batch, weight decay and prototypes are guesses; bf16",
    ),
    "moco_imagenette": Run(
        "moco_v3_vits16",
        ["optim.batch_size=256", "optim.lr=5e-4", "optim.lr_scaling=fixed", "optim.warmup={epochs=10}", BF16],
        82.6,
        84.7,
        STABLE_PRETRAINING,
        "their script is not public: rate as RESULTS.md says; batch 256 and warm-up are guesses, all else as in the recipe here; bf16",
    ),
    "simclr_imagenette": Run(
        "dino_vits16",
        [SIMCLR_HEAD, TWO_VIEWS, LARS + ",warmup={percent=1},length={epochs=200}}", "model.pos_offset=0", "model.drop_path=0", BF16],
        73.3,
        74.9,
        STABLE_PRETRAINING,
        "LARS without the limit of its rate to that of the schedule; bf16 instead of f16",
    ),
    "simclr_cifar": Run(
        "simclr_cifar",
        ["method.temperature=0.5", "views.crops.0.scale=[0.08,1.0]", "optim.warmup={steps=0}", BF16],
        84.7,
        None,
        LIGHTLY,
        "no normalization after the last layer of the head; bf16",
        k=200,
        temperature=0.1,
        probe_flags=["--resize-px", "32"],
    ),
    "swav_cifar": Run(
        "swav_cifar",
        [
            *("views.crops.0.scale=[0.14,1.0]", "method.freeze_prototypes={steps=0}"),
            "views.crops.0.jitter={brightness=0.64,contrast=0.64,saturation=0.64,hue=0.16,p=0.8}",
            *(ADAM + ",clip_norm=0.0,warmup={steps=0},length={epochs=200}}", BF16),
        ],
        81.2,
        None,
        LIGHTLY,
        "AdamW in place of Adam with L2; prototypes without a bias; bf16",
        k=200,
        temperature=0.1,
        probe_flags=["--resize-px", "32"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=list(RUNS))
    parser.add_argument("--ocelli", default="target/cuda/release/ocelli")
    parser.add_argument("--train", required=True, help="labeled shards, a pattern, or a folder of images with a subfolder for each class")
    parser.add_argument("--test", required=True, help="the same to test on")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call, with the time to stop")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    start = time.perf_counter()
    rows = measure.Rows(args.workdir / "published.jsonl", {})
    part = {"run": args.run, "epochs": args.epochs, "train": args.train, "test": args.test}
    workdir = args.workdir / f"{args.run}-{args.epochs}"
    if rows.find(part="trained", **part) is None and not train(args, rows, part, workdir):
        print_left(args, rows, part, workdir)
        return
    if rows.find(part="scored", **part) is None:
        if args.seconds - (time.perf_counter() - start) < TO_SCORE_S:
            print("trained; the next call scores it")
            return
        run = RUNS[args.run]
        flags = ["--device", args.device, *run.probe_flags]
        log = measure.log_of(workdir)
        scores = measure.probe(args.ocelli, workdir, args.train, args.test, log, *flags, k=run.k, temperature=run.temperature)
        rows.add({"part": "scored"} | part | scores)
    measure.publish(args.workdir / "published.md", report(args, rows))


def train(args: argparse.Namespace, rows: measure.Rows, part: dict, workdir: pathlib.Path) -> bool:
    """Trains until the run is finished or its time is over; records the call, and returns whether the run is finished."""
    run = RUNS[args.run]
    settings = [*run.settings, f"optim.length={{epochs={args.epochs}}}", "run.checkpoint_every_minutes=3"]
    command = [args.ocelli, "pretrain", "--recipe", run.recipe, "--shards", args.train, "--workdir", str(workdir), "--device", args.device]
    command += [*measure.set_flags(settings), "--json"]
    print("$ " + shlex.join(command), flush=True)
    workdir.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    log = measure.log_of(workdir)
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        code = wait(process, max(1.0, args.seconds - TO_STOP_S))
    seconds = time.perf_counter() - start
    if code not in [0, *STOPPED]:
        sys.exit(f"exit code {code}; the end of {log}:\n{measure.last_lines(log)}")
    rows.add({"part": "trained" if code == 0 else "call"} | part | {"seconds": seconds, "step": last_step(workdir)})
    return code == 0


def wait(process: subprocess.Popen, seconds: float) -> int:
    """Waits for the end of a run, which is asked for after some seconds; returns its exit code."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(TO_STOP_S)
    except subprocess.TimeoutExpired:
        # Its last checkpoint is at most three minutes old.
        process.kill()
        process.wait()
        return STOPPED[0]


def last_step(workdir: pathlib.Path) -> int:
    """Steps of the run, as far as they are logged."""
    metrics = workdir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line)["step"] + 1 for line in lines if '"step"' in line and line.endswith("}")]
    return max(steps, default=0)


def print_left(args: argparse.Namespace, rows: measure.Rows, part: dict, workdir: pathlib.Path) -> None:
    """Says how far the run is, and how many more calls of this length are to be expected."""
    calls = rows.find_all(part="call", **part)
    total = measure.plan_number(workdir, "total_steps") if (workdir / "plan.toml").exists() else 0
    done = calls[-1]["step"]
    print(f"{calls[-1]['seconds']:.0f} s: step {done:,} of {total:,}; the same command continues")
    if 0 < done < total:
        n_calls = math.ceil((total - done) / (done / len(calls)))
        print(f"about {n_calls} more calls of {args.seconds:.0f} s")


def report(args: argparse.Namespace, rows: measure.Rows) -> str:
    header = ["run", "epochs", "images", "seconds", "k-NN", "theirs", "linear", "theirs", "theirs are", "differs"]
    body = []
    for scored in rows.find_all(part="scored"):
        run = RUNS[scored["run"]]
        part = {key: scored[key] for key in ("run", "epochs", "train", "test")}
        calls = [*rows.find_all(part="call", **part), *rows.find_all(part="trained", **part)]
        n_images = measure.plan_number(args.workdir / f"{scored['run']}-{scored['epochs']}", "n_samples")
        body.append([
            f"`{scored['run']}`",
            scored["epochs"],
            f"{n_images:,}",
            f"{sum(call['seconds'] for call in calls):.0f}",
            f"{scored['knn']:.1f}",
            run.knn,
            f"{scored['linear']:.1f}",
            run.linear or "",
            run.source,
            run.differs,
        ])
    return "\n\n".join([measure.table(header, body), f"{measure.machine(args.ocelli)}; {gpu()}"])


def gpu() -> str:
    """The GPUs of this machine, by NVIDIA's tool."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no GPU of NVIDIA"


if __name__ == "__main__":
    main()
