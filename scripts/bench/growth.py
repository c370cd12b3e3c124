"""How cost grows: with the batch, tokens, prototypes, shards, and samples of an index.

Runs the program's own benchmarks and prints a table; takes about ten minutes. Shards are made of procedural images, and for
the largest indices of members of one byte, in a folder that is removed.

    python scripts/bench/growth.py --ocelli target/release/ocelli [--only batch tokens ...]
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import time

TAR_BLOCK = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli")
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--most-samples", type=int, default=1_000_000, help="of an index; a million take 1 GB of disk")
    args = parser.parse_args()
    print("| what grows | to | takes | for each | ratio to the row above, for each | of |")
    print("|---|---|---|---|---|---|")
    for kind in args.only:
        before = None
        for size, seconds, note in KINDS[kind](args):
            each = seconds / size
            ratio = "" if before is None else f"{each / before:.2f}"
            print(f"| {kind} | {size:,} | {told(seconds)} | {told(each)} | {ratio} | {note} |", flush=True)
            before = each


def told(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e9:.1f} ns"


def last_json(command: list[str]) -> dict:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def step(args, recipe: str, batch: int, *sets: str) -> float:
    command = [args.ocelli, "bench", "step", "--json", "--recipe", recipe, "--batch", str(batch), "--repeats", "3"]
    for value in sets:
        command += ["--set", value]
    return last_json(command)["step_ms"] / 1e3


def batch(args):
    for n in (16, 32, 64, 128, 256):
        yield n, step(args, "quickstart", n), "step of quickstart"


def tokens(args):
    """Of a ViT-S/16, whose attention grows with their square."""
    for side in (112, 224, 448):
        crop = f"views.crops=[{{count=2,size_px={side},scale=[0.5,1.0],flip_p=0.5,gray_p=0.2,blur_p=0.1,blur_sigma=[0.1,1.0],solarize_p=0.0,jitter={{brightness=0.4,contrast=0.4,saturation=0.4,hue=0.1,p=0.8}}}}]"
        sets = ['views.preset="custom"', crop, f"model.image_px={side}"]
        yield (side // 16) ** 2 + 1, step(args, "lejepa_vits16", 2, *sets), f"step of a ViT-S/16 at {side} px, batch 2"


def prototypes(args):
    for n in (1024, 4096, 16384, 65536):
        yield n, step(args, "dino_cifar", 16, f"method.prototypes={n}"), "step of dino_cifar, batch 16"


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {result.stderr}")
    return time.perf_counter() - start


def shards(args):
    """From the start of `pretrain` to its first step, with sidecars."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        subprocess.run([args.ocelli, "shards", "synth", "--out", folder / "all", "--count", "10000", "--size-px", "16"], check=True, capture_output=True)
        whole = sorted(str(path) for path in (folder / "all").glob("*.tar"))
        for n in (1, 10, 100, 1000, 10_000):
            out = folder / str(n)
            subprocess.run([args.ocelli, "shards", "reshard", *whole, "--out", out, "--samples-per-shard", str(10_000 // n), "--prefix", "s"], check=True, capture_output=True)
            work = folder / f"run{n}"
            run = subprocess.Popen(
                [args.ocelli, "pretrain", "--recipe", "dino_cifar", "--shards", f"{out}/s-{{000000..{n - 1:06}}}.tar", "--workdir", work, "--set", "optim.batch_size=8", "--set", "run.log_every_steps=1", "--set", "optim.length={steps=2}"],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            start = time.perf_counter()
            metrics = work / "metrics.jsonl"
            while run.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.005)
            seconds = time.perf_counter() - start
            if run.wait() != 0:
                raise SystemExit(run.stderr.read())
            yield n, seconds, "start to first step of `pretrain`"


def samples(args):
    """Of one shard without a sidecar: the time that `shards index` takes, then `shards ls` with the index."""
    n = 100_000
    while n <= args.most_samples:
        with tempfile.TemporaryDirectory() as folder:
            shard = f"{folder}/s-000000.tar"
            with open(shard, "wb") as file:
                for i in range(n):
                    file.write(member(f"{i:08}.jpg"))
                file.write(bytes(2 * TAR_BLOCK))
            indexed = seconds_of([args.ocelli, "shards", "index", shard])
            listed = seconds_of([args.ocelli, "shards", "ls", shard])
            yield n, listed, f"`shards ls`; its index was made in {indexed:.1f} s"
        n *= 10


def member(name: str) -> bytes:
    """One byte under `name`, as tar has it."""
    header = bytearray(TAR_BLOCK)
    header[: len(name)] = name.encode()
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124:136], header[136:148] = b"00000000001\0", b"00000000000\0"
    header[148:156], header[156:157] = b"        ", b"0"
    header[257:265] = b"ustar\x0000"
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + b"x" + bytes(TAR_BLOCK - 1)


KINDS = {"batch": batch, "tokens": tokens, "prototypes": prototypes, "shards": shards, "samples": samples}

if __name__ == "__main__":
    main()
