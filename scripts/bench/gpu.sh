#!/bin/bash
# What is to be known of a machine with an NVIDIA GPU, in one command below nine minutes: is what it computes right,
# how fast is a step beside PyTorch's, where does the time go; one table at the end.
#
#   OCELLI=target/cuda/release/ocelli scripts/bench/gpu.sh OUT
#
# OCELLI names the program, built elsewhere with `--features cuda` (`strip` and `zstd -19` make 25 MB of it, to be
# unpacked there); OCELLI_MPI, if set, one built with `--features cuda,mpi`, for two processes on one GPU. Needs CUDA's
# headers and NVRTC; PyTorch and timm for the other side, which is left out without them. BUDGET_S is what all of it may take; what no longer fits is left out, and said so.
# In OUT: log.txt, results.json, kernels.txt, table.md.

set -u
OUT=${1:?a folder for the results}
OCELLI=$(realpath "${OCELLI:-target/cuda/release/ocelli}")
BUDGET_S=${BUDGET_S:-530}
HERE=$(cd "$(dirname "$0")" && pwd)
MODELS=${MODELS-s b l}
DEVICE=${DEVICE:-cuda}
PROFILED=${PROFILED:-dino_vits16}
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export OUT OCELLI HERE WORK DEVICE PROFILED
set -o pipefail
exec > >(tee "$OUT/log.txt") 2>&1
start=$SECONDS
# Autotuning results and compiled kernels, which a folder of the caller's keeps for the next call.
export OCELLI_CACHE=${OCELLI_CACHE:-$WORK/cache}

# CUDA's headers, for kernels that are compiled when they are first used; and NCCL under the name it is looked for by.
if [ -z "${CUDA_PATH:-}" ] && command -v nvcc >/dev/null; then
    CUDA_PATH=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
    export CUDA_PATH
fi
mkdir -p "$WORK/lib"
link() {
    local folder library name
    for folder in $(timeout 20 python3 -c "import $1; print(*$1.__path__)" 2>/dev/null); do
        for library in "$folder"/lib/$2*.so.*; do
            [ -e "$library" ] || continue
            name=$(basename "$library")
            ln -sf "$library" "$WORK/lib/$name"
            ln -sf "$library" "$WORK/lib/${name%%.so*}.so"
        done
    done
}
link nvidia.nccl libnccl
# The toolkit's own compiler fits its headers; a package's is for machines that have none.
if ! ls "${CUDA_PATH:-/usr/local/cuda}"/lib64/libnvrtc.so* >/dev/null 2>&1; then
    link nvidia.cuda_nvrtc libnvrtc
    link nvidia.cu13 libnvrtc
fi
export LD_LIBRARY_PATH=$WORK/lib:${CUDA_PATH:-/usr/local/cuda}/lib64:${LD_LIBRARY_PATH:-}

left() { echo $((BUDGET_S - (SECONDS - start))); }

# say NAME SECONDS COMMAND…: runs it within what is left, and notes how it ended.
results=()
say() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ "$(left)" -lt "$limit" ] && limit=$(left)
    echo "== $name"
    if [ "$limit" -lt 5 ]; then
        results+=("$name|left out: no time")
        return 1
    fi
    case $(type -t "$1") in
        # A function of ours runs in a shell of its own, which timeout can end.
        function) export -f "$1"; timeout -s KILL "$limit" bash -o pipefail -c '"$@"' "$1" "$@" ;;
        *) timeout -s KILL "$limit" "$@" ;;
    esac
    code=$?
    case $code in
        0) results+=("$name|right, $((SECONDS - began)) s") ;;
        124 | 137) results+=("$name|NOT ENDED within $limit s") ;;
        *) results+=("$name|WRONG, exit code $code") ;;
    esac
    return "$code"
}

[ -x "$OCELLI" ] || { echo "no program at $OCELLI"; exit 2; }
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
"$OCELLI" --version

# Correctness.
say "doctor" 60 "$OCELLI" doctor --device "$DEVICE" --folder "$WORK"
# Without KoLeo, whose choice of neighbors turns over with a rounding while embeddings are nearly alike.
say "f32 beside the CPU" 120 "$OCELLI" bench device --device "$DEVICE" --recipe dino_shapes --batch 8 \
    --set method.koleo_weight=0

# Speed.
has_peer=no
! timeout 60 python3 -c 'import torch, timm' 2>/dev/null || has_peer=yes
size() {
    case $1 in
        s) echo "384 12 6 vit_small_patch16_224 64" ;;
        b) echo "768 12 12 vit_base_patch16_224 64" ;;
        l) echo "1024 24 16 vit_large_patch16_224 32" ;;
    esac
}
measure() {
    model=$1
    read -r width depth heads timm batch <<< "$(size "$model")"
    export model width depth heads timm batch
    bench() {
        "$OCELLI" bench step --device "$DEVICE" --recipe dino_vits16 --batch "$batch" --repeats 5 --json \
            --set "model.width=$width" --set "model.depth=$depth" --set "model.heads=$heads" \
            --set "run.keep=$keep" --set 'optim.precision={compute="bf16"}' | tee "$WORK/last" &&
            tail -1 "$WORK/last" > "$WORK/ocelli-$model.json"
    }
    # The first start finds out which kernels are the fastest, the second knows. Without graphs it needs less memory.
    keep=100000
    export keep
    say "ocelli, $timm, first start" 240 bench
    if ! say "ocelli, $timm" 60 bench; then
        keep=0
        say "ocelli, $timm, no graph kept" 60 bench
    fi
    peer ""
}
peer() {
    export how=$1
    step() {
        python3 "$HERE/peer_dino.py" --model "$timm" --batch "$batch" --repeats 5 --tf32 $how | tee "$WORK/last" &&
            tail -1 "$WORK/last" > "$WORK/torch${how}-$model.json"
    }
    if [ "$has_peer" = yes ]; then
        say "PyTorch$how, $timm" 120 step
    else
        results+=("PyTorch$how, $timm|left out: no torch or no timm")
    fi
}
read -r model others <<< "$MODELS"
[ -z "$model" ] || measure "$model"

# Where the time of our step goes, by kernel: CubeCL times every launch, which makes the step itself slower.
profile() {
    # Read from the folder that the program is started in.
    printf '[profiling]\nlogger = { level = "medium", file = "%s" }\n' "$WORK/kernels.log" > "$WORK/cubecl.toml"
    (cd "$WORK" && "$OCELLI" bench step --device "$DEVICE" --recipe "$PROFILED" --batch 64 --repeats 2 --matrix 256 \
        --set 'optim.precision={compute="bf16"}' > /dev/null) &&
        python3 "$HERE/gpu_table.py" kernels "$WORK/kernels.log" | tee "$OUT/kernels.txt"
}
say "our step by kernel" 90 profile

# What is less likely to be wrong, and the larger models, in what time is left.
say "f32 beside the CPU, ViT-S/16" 120 "$OCELLI" bench device --device "$DEVICE" --recipe dino_vits16 --batch 2 --steps 5
say "bf16 beside the CPU" 90 "$OCELLI" bench device --device "$DEVICE" --recipe dino_shapes --batch 8 \
    --set method.koleo_weight=0 --set 'optim.precision={compute="bf16"}'
say "NCCL on one rank: every operation" 60 "$OCELLI" doctor --fabric --device "$DEVICE" --engine nccl

# One rank that talks to itself over NCCL, bit for bit one that talks to nobody.
itself() {
    local loss engine
    for engine in auto nccl; do
        loss=$("$OCELLI" bench shard --as-set --device "$DEVICE" --engine "$engine" --recipe dino_shapes --batch 16 --repeats 4 \
            --json | tail -1 | grep -o '"loss":[^,}]*') || return 1
        echo "$engine $loss"
        echo "$loss" >> "$WORK/losses"
    done
    [ "$(sort -u "$WORK/losses" | wc -l)" = 1 ]
}
say "NCCL on one rank: a step's bits" 90 itself

# Forty steps, killed within the thirtieth and gone on with, beside forty that were not: time enough for the checkpoint of
# step 10 to be written beside the steps that follow it.
resumed() {
    local run shard=$WORK/data/train-000000.tar
    "$OCELLI" shards synth --out "$WORK/data" --count 64 --size-px 48 >/dev/null || return 1
    run=("$OCELLI" pretrain --recipe dino_shapes --device "$DEVICE" --shards "$shard" --set optim.batch_size=16
        --set 'optim.length={steps=40}' --set 'optim.warmup={steps=1}' --set run.log_every_steps=1
        --set run.checkpoint_every_steps=10)
    "${run[@]}" --workdir "$WORK/whole" || return 1
    "${run[@]}" --workdir "$WORK/broken" --inject-fault kill:rank=0,step=29,phase=backward
    [ $? = 137 ] || return 1
    "${run[@]}" --workdir "$WORK/broken" 2>&1 | tee "$WORK/again" || return 1
    grep 'continuing at step [12]0' "$WORK/again" || return 1
    grep -o '"train/loss":[^,}]*' "$WORK/whole/metrics.jsonl" > "$WORK/a"
    grep -o '"train/loss":[^,}]*' "$WORK/broken/metrics.jsonl" > "$WORK/b"
    paste "$WORK/a" "$WORK/b"
    [ "$(wc -l < "$WORK/a")" = 40 ] && cmp "$WORK/a" "$WORK/b"
}
say "forty steps, killed and resumed" 120 resumed

# Two processes on one GPU, whose collectives go over the host, beside one: two parts each way.
two() {
    local losses ranks
    for ranks in 1 2; do
        losses=$(mpirun --allow-run-as-root --oversubscribe -n "$ranks" "$OCELLI_MPI" bench shard --as-set --device "$DEVICE" \
            --engine mpi --recipe dino_shapes --batch 16 --set optim.micro_batches=2 --repeats 4 --json |
            tail -1 | grep -o '"loss":[^,}]*') || return 1
        echo "$ranks $losses"
        echo "${losses#*:}" >> "$WORK/two"
    done
    awk 'NR == 1 { a = $1 } NR == 2 { d = a - $1; if (d < 0) d = -d; exit !(d <= 1e-3 * a) }' "$WORK/two"
}
if [ -n "${OCELLI_MPI:-}" ] && command -v mpirun >/dev/null; then
    say "two processes on one GPU over MPI" 90 two
else
    results+=("two processes on one GPU over MPI|left out: no MPI")
fi
for model in ${others:-}; do
    measure "$model"
done
# Compiling takes PyTorch longer than all the rest.
for model in $MODELS; do
    read -r width depth heads timm batch <<< "$(size "$model")"
    export model width depth heads timm batch
    peer --compile
done

echo
printf '%s\n' "${results[@]}" > "$WORK/results"
python3 "$HERE/gpu_table.py" table "$WORK" "$WORK/results" "$OUT/results.json" | tee "$OUT/table.md"
echo "$((SECONDS - start)) s"
# What PyTorch does not end is no fault of ours.
! grep -v '^PyTorch' "$WORK/results" | grep -q 'WRONG\|NOT ENDED'
