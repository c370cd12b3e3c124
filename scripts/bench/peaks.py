"""Peak memory of a rank beside `ocelli plan`, over recipes, numbers of ranks, types of numbers, and with all graphs kept or none.

Prints a row for each, and how many of the peaks above --least-mb are near the plan; takes about an hour. On several ranks the peak depends
on when transfers end: it is the highest of --repeats steps and of all ranks. Each thread keeps a buffer of the size of the L2 cache.

    python scripts/bench/peaks.py --ocelli target/release/ocelli [--only dino_cifar ...] [--ranks 1 2 4]
"""

import argparse
import itertools
import json
import os
import subprocess

VIT_S = 'model={{arch="vit",image_px={},patch_px={},width=384,depth=12,heads=6,layer_scale=1e-5,drop_path=0.1}}'

RECIPES = [
    ("dino_cifar", 64, []),
    ("swav_cifar", 64, []),
    ("simclr_cifar", 64, []),
    ("simclr_cifar", 8, []),
    ("moco_cifar", 64, []),
    ("dinov2_cifar", 32, []),
    ("dinov3_cifar", 32, []),
    ("lejepa_cifar", 64, []),
    ("dino_vits16", 8, []),
    ("dino_resnet50", 8, []),
    ("simclr_resnet50", 8, []),
    ("swav_resnet50", 8, []),
    ("moco_v3_resnet50", 8, []),
    ("moco_v3_vits16", 8, []),
    ("seer_regnety_32gf", 8, ['model.size="800mf"']),
    ("mae_cifar", 64, []),
    ("ijepa_cifar", 64, []),
    ("data2vec_cifar", 64, []),
    ("byol_cifar", 64, []),
    ("barlow_twins_cifar", 64, []),
    ("vicreg_cifar", 64, []),
    # High resolution at the size of a ViT-S: 1,370 tokens; 2,305 and, for Gram's teacher, 5,185.
    ("dinov2_continue", 2, [VIT_S.format(518, 14), "views.global_px=518"]),
    (
        "dinov3_vit7b16_highres",
        2,
        [
            *("model.width=384", "model.depth=12", "model.heads=6", "model.mlp=gelu", "model.mlp_ratio=4"),
            *("method.prototypes=16384", "method.head_hidden=2048", "method.head_bottleneck=256"),
            *("method.patch_head={prototypes=16384,hidden=2048,bottleneck=256}", "method.koleo_group=2"),
            *("method.mask_group=2", "views.mix=[]", "views.global_px=768", "views.gram_px=1152"),
        ],
    ),
    # Scores are most of the memory.
    ("dino_cifar", 64, ["method.prototypes=65536"]),
    ("dinov2_cifar", 32, ["method.prototypes=65536"]),
    ("dinov2_cifar", 32, ["method.prototypes=65536", "method.patch_head.prototypes=65536"]),
    ("dinov3_cifar", 32, ["method.prototypes=65536"]),
    ("swav_cifar", 16, ["method.prototypes=16384"]),
]
NAMES = sorted({name for name, _, _ in RECIPES})
TYPES = {"f32": [], "bf16": ['optim.precision={compute="bf16",memory="bf16",gather="bf16",reduce="bf16"}']}
GRAPHS = {"all": ["run.keep=100000"], "none": ["run.keep=0"]}
ROOT_TOO = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPIRUN = ["mpirun", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ocelli", default="target/release/ocelli", help="a build with MPI, for more than one rank")
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3, help="steps on several ranks, after one for warm-up")
    parser.add_argument("--least-mb", type=float, default=50.0)
    args = parser.parse_args()
    print("| recipe | changed | images | ranks | graphs kept | type | peak, MB | plan | |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors = []
    chosen = [recipe for recipe in RECIPES if recipe[0] in args.only]
    for (recipe, batch, changed), n_ranks, graphs, dtype in itertools.product(chosen, args.ranks, GRAPHS, TYPES):
        peak, plan = measured(args, recipe, batch, n_ranks, GRAPHS[graphs] + TYPES[dtype] + changed)
        error = plan / peak - 1
        if peak >= args.least_mb:
            errors.append(error)
        row = [recipe, " ".join(changed), batch, n_ranks, graphs, dtype, f"{peak:.1f}", f"{plan:.1f}", f"{100 * error:+.1f} %"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    near = {limit: sum(abs(error) <= limit / 100 for error in errors) for limit in (5, 10)}
    print(f"\n{len(errors)} peaks above {args.least_mb:.0f} MB: {near[5]} planned within 5 % of the peak, {near[10]} within 10 %")


def measured(args: argparse.Namespace, recipe: str, batch: int, n_ranks: int, sets: list[str]) -> tuple[float, float]:
    """Returns the highest peak and the planned one, in MB."""
    # One rank has the same peak in every step.
    repeats = args.repeats if n_ranks > 1 else 1
    command = [args.ocelli, "bench", "shard", "--recipe", recipe, "--batch", str(batch), "--as-set", "--json"]
    command += ["--repeats", str(repeats), "--set", "run.workers=1"]
    for value in sets:
        command += ["--set", value]
    if n_ranks > 1:
        command = [*MPIRUN, str(n_ranks), *command]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | ROOT_TOO)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {result.stderr}")
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    (mode,) = json.loads(lines[-1])["modes"]
    return mode["peak_bytes"] / 1e6, mode["planned_peak_bytes"] / 1e6


if __name__ == "__main__":
    main()
