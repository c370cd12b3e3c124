#!/bin/bash
# Tests a machine with an NVIDIA GPU: are results correct, how fast is a step compared with PyTorch's, where does the time go; one
# table at the end. It runs in parts of less than ten minutes each, for a machine that is available for only half an hour.
#
#   OCELLI=target/cuda/release/ocelli scripts/bench/gpu.sh OUT [PART…]
#
# Parts, most important first; all of them, if none is named:
#
#   check        doctor, results beside the CPU's, NCCL on one rank, a run that is killed and resumed
#   layers       every layer of ViT-S, B and L beside sums in f64, three times bit for bit, and its time beside PyTorch's
#   step         a step of ViT-S/16 by DINO: cuBLASLt, CubeCL's kernels, PyTorch, compiled PyTorch
#   profile      the step's kernels by time
#   models       steps of ViT-B/16 and ViT-L/16
#   convolution  ResNet-18 beside PyTorch
#
# A finished part is not run again: its results are in OUT, and another call continues with the next one. Remove OUT/PART.done to
# repeat it. OCELLI names the program, built elsewhere with `--features cuda` (`strip` and `zstd -19` reduce it to 25 MB; unpack
# it there); OCELLI_MPI, if set, one built with `--features cuda,mpi`, for two processes on one GPU. Needs CUDA's headers, NVRTC
# and cuBLASLt; PyTorch and timm for the comparison, which is skipped without them. BUDGET_S limits the time of one part; what no
# longer fits is skipped, with a message. DRY=1 runs it on the tests' stub driver, which computes nothing, with small sizes. In
# OUT: log.txt, results.json, kernels.txt, table.md.

set -u
OUT=${1:?a folder for the results}
shift
PARTS=("$@")
[ ${#PARTS[@]} -gt 0 ] || PARTS=(check layers step profile models convolution)
OCELLI=$(realpath "${OCELLI:-target/cuda/release/ocelli}")
BUDGET_S=${BUDGET_S:-560}
HERE=$(cd "$(dirname "$0")" && pwd)
DEVICE=${DEVICE:-cuda}
DRY=${DRY:-}
PROFILED=${PROFILED:-dino_vits16}
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export OUT OCELLI HERE WORK DEVICE PROFILED DRY
set -o pipefail
exec > >(tee -a "$OUT/log.txt") 2>&1
# Autotuning results and compiled kernels, which the next part needs as well.
export OCELLI_CACHE=${OCELLI_CACHE:-$OUT/cache}

# CUDA's headers, for kernels that are compiled when they are first used; and its libraries under the names they are looked for by.
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
if [ -z "$DRY" ]; then
    link nvidia.nccl libnccl
    # The toolkit's own libraries fit its headers; a package's are for machines that have none.
    toolkit=${CUDA_PATH:-/usr/local/cuda}/lib64
    for library in libnvrtc libcublasLt libcublas; do
        ls "$toolkit/$library".so* >/dev/null 2>&1 && continue
        link nvidia.cuda_nvrtc $library
        link nvidia.cublas $library
        link nvidia.cu13 $library
    done
    export LD_LIBRARY_PATH=$WORK/lib:$toolkit:${LD_LIBRARY_PATH:-}
fi

start=$SECONDS
left() { echo $((BUDGET_S - (SECONDS - start))); }

# say NAME SECONDS COMMAND…: runs it within what is left, and notes how it ended.
say() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ "$(left)" -lt "$limit" ] && limit=$(left)
    echo "== $name"
    if [ "$limit" -lt 5 ]; then
        echo "$name|left out: no time" >> "$OUT/$part.results"
        return 1
    fi
    case $(type -t "$1") in
        # A function of ours runs in a shell of its own, which timeout can end.
        function) export -f "$1"; timeout -s KILL "$limit" bash -o pipefail -c '"$@"' "$1" "$@" ;;
        *) timeout -s KILL "$limit" "$@" ;;
    esac
    code=$?
    case $code in
        0) echo "$name|right, $((SECONDS - began)) s" ;;
        124 | 137) echo "$name|NOT ENDED within $limit s" ;;
        *) echo "$name|WRONG, exit code $code" ;;
    esac >> "$OUT/$part.results"
    return "$code"
}

# compare NAME SECONDS COMMAND…: as say, but for the stub driver, which computes nothing that could be compared.
compare() {
    if [ -n "$DRY" ]; then
        echo "$1|left out: nothing is computed" >> "$OUT/$part.results"
        return
    fi
    say "$@"
}

has_peer=no
[ -n "$DRY" ] || ! timeout 60 python3 -c 'import torch, timm' 2>/dev/null || has_peer=yes

part_check() {
    compare "doctor" 60 "$OCELLI" doctor --device "$DEVICE" --folder "$WORK"
    # Without KoLeo, whose choice of neighbors turns over with a rounding while embeddings are nearly alike.
    compare "f32 beside the CPU" 120 "$OCELLI" bench device --device "$DEVICE" --recipe dino_shapes --batch 8 \
        --set method.koleo_weight=0
    compare "f32 beside the CPU, ViT-S/16" 120 "$OCELLI" bench device --device "$DEVICE" --recipe dino_vits16 --batch 2 --steps 5
    compare "bf16 beside the CPU" 90 "$OCELLI" bench device --device "$DEVICE" --recipe dino_shapes --batch 8 \
        --set method.koleo_weight=0 --set 'optim.precision={compute="bf16"}'
    compare "bf16 beside the CPU, ViT-S/16" 120 "$OCELLI" bench device --device "$DEVICE" --recipe dino_vits16 --batch 2 --steps 3 \
        --set 'optim.precision={compute="bf16"}'
    compare "the same by CubeCL's kernels" 120 "$OCELLI" bench device --device "$DEVICE" --recipe dino_vits16 --batch 2 --steps 3 \
        --set 'optim.precision={compute="bf16"}' --set run.kernels=cubecl
    compare "ResNet-18 beside the CPU" 90 "$OCELLI" bench device --device "$DEVICE" --recipe swav_cifar --batch 4 --steps 3
    compare "NCCL on one rank: every operation" 60 "$OCELLI" doctor --fabric --device "$DEVICE" --engine nccl
    compare "NCCL on one rank: a step's bits" 90 itself
    compare "three equal runs of four steps, bit for bit" 90 three
    compare "forty steps, killed and resumed" 120 resumed
    if [ -n "${OCELLI_MPI:-}" ] && command -v mpirun >/dev/null; then
        compare "two processes on one GPU over MPI" 90 two
    else
        echo "two processes on one GPU over MPI|left out: no MPI" >> "$OUT/$part.results"
    fi
}

# losses COMMAND…: the loss of the last of four steps of a run by this command.
losses() {
    [ -d "$WORK/steps" ] || "$OCELLI" shards synth --out "$WORK/steps" --count 64 --size-px 48 >/dev/null || return 1
    rm -rf "$WORK/run"
    "$@" --device "$DEVICE" --recipe dino_shapes --shards "$WORK/steps/train-000000.tar" --workdir "$WORK/run" \
        --set optim.batch_size=16 --set 'optim.length={steps=4}' --set 'optim.warmup={steps=1}' --set run.log_every_steps=1 \
        >&2 || return 1
    grep -o '"train/loss":[^,}]*' "$WORK/run/metrics.jsonl" | tail -1
}
export -f losses

# One rank that talks to itself over NCCL, bit for bit one that talks to nobody.
itself() {
    local engine
    for engine in auto nccl; do
        losses "$OCELLI" pretrain --engine "$engine" | tee -a "$WORK/losses" || return 1
    done
    [ "$(sort -u "$WORK/losses" | wc -l)" = 1 ]
}

three() {
    local number
    for number in 1 2 3; do
        losses "$OCELLI" pretrain --set 'optim.precision={compute="bf16"}' | tee -a "$WORK/three" || return 1
    done
    [ "$(sort -u "$WORK/three" | wc -l)" = 1 ]
}

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
    grep 'resuming at step [12]0' "$WORK/again" || return 1
    grep -o '"train/loss":[^,}]*' "$WORK/whole/metrics.jsonl" > "$WORK/a"
    grep -o '"train/loss":[^,}]*' "$WORK/broken/metrics.jsonl" > "$WORK/b"
    paste "$WORK/a" "$WORK/b"
    [ "$(wc -l < "$WORK/a")" = 40 ] && cmp "$WORK/a" "$WORK/b"
}

# Two processes on one GPU, whose collectives go over the host, beside one: two parts each way.
two() {
    local losses ranks
    for ranks in 1 2; do
        losses=$(losses mpirun --allow-run-as-root --oversubscribe -n "$ranks" "$OCELLI_MPI" pretrain --engine mpi \
            --set optim.micro_batches=2) || return 1
        echo "$ranks $losses"
        echo "${losses#*:}" >> "$WORK/two"
    done
    awk 'NR == 1 { a = $1 } NR == 2 { d = a - $1; if (d < 0) d = -d; exit !(d <= 1e-3 * a) }' "$WORK/two"
}

size() {
    case $1 in
        s) echo "384 12 6 vit_small_patch16_224 64" ;;
        b) echo "768 12 12 vit_base_patch16_224 64" ;;
        l) echo "1024 24 16 vit_large_patch16_224 32" ;;
    esac
}

# layers MODEL: its layers, on the tokens of global views and of local ones, ours and PyTorch's.
layers() {
    model=$1 repeats=5
    read -r width depth heads timm batch <<< "$(size "$model")"
    tokens=("$((2 * 197 * batch))" "$((8 * 37 * batch))")
    [ -z "$DRY" ] || { tokens=(64) repeats=1; }
    "$OCELLI" bench layers --device "$DEVICE" --width "$width" "${tokens[@]/#/--tokens=}" --repeats "$repeats" --json |
        tee "$WORK/last"
    local code=$?
    tail -1 "$WORK/last" > "$OUT/layers-ocelli-$model.json"
    # On the stub driver all is wrong, and found to be.
    [ -z "$DRY" ] || { [ "$code" = 1 ] && grep -q '"right":false' "$OUT/layers-ocelli-$model.json"; return; }
    return "$code"
}
layers_peer() {
    read -r width depth heads timm batch <<< "$(size "$1")"
    python3 "$HERE/peer_layers.py" --device "$DEVICE" --width "$width" --tokens "$((2 * 197 * batch))" "$((8 * 37 * batch))" |
        tee "$WORK/last" && tail -1 "$WORK/last" > "$OUT/layers-torch-$1.json"
}
export -f size

part_layers() {
    local model
    for model in s b l; do
        say "layers of ViT-${model^}" 150 layers "$model"
        [ "$has_peer" = no ] || say "PyTorch, layers of ViT-${model^}" 60 layers_peer "$model"
    done
}

# measure MODEL KERNELS: a step of ours. The first start compiles and checks, the second is measured. Without graphs it needs less memory.
measure() {
    model=$1 kernels=$2
    read -r width depth heads timm batch <<< "$(size "$model")"
    repeats=5 matrix=8192 unchecked=
    [ -z "$DRY" ] || { batch=2 repeats=1 matrix=64 depth=2 unchecked=--unchecked; }
    export model kernels width depth heads timm batch repeats matrix unchecked
    bench() {
        "$OCELLI" bench step $unchecked --device "$DEVICE" --recipe dino_vits16 --batch "$batch" --repeats "$repeats" --json \
            --matrix "$matrix" --set "model.width=$width" --set "model.depth=$depth" --set "model.heads=$heads" \
            --set "run.keep=$keep" --set "run.kernels=$kernels" --set 'optim.precision={compute="bf16"}' | tee "$WORK/last" &&
            tail -1 "$WORK/last" > "$OUT/ocelli-$kernels-$model.json"
    }
    keep=100000
    export keep
    say "ocelli, $timm, $kernels, first start" 240 bench
    if ! say "ocelli, $timm, $kernels" 60 bench; then
        keep=0
        say "ocelli, $timm, $kernels, no graph kept" 60 bench
    fi
}

# peer MODEL [--compile]: the same step in PyTorch.
peer() {
    model=$1 how=${2:-}
    read -r width depth heads timm batch <<< "$(size "$model")"
    export model how timm batch
    torch_step() {
        python3 "$HERE/peer_dino.py" --model "$timm" --batch "$batch" --repeats 5 --tf32 $how | tee "$WORK/last" &&
            tail -1 "$WORK/last" > "$OUT/torch${how}-$model.json"
    }
    if [ "$has_peer" = yes ]; then
        say "PyTorch$how, $timm" 150 torch_step
    else
        echo "PyTorch$how, $timm|left out: no torch or no timm" >> "$OUT/$part.results"
    fi
}

part_step() {
    measure s cublaslt
    peer s
    measure s cubecl
    # Compiling takes PyTorch longer than all the rest.
    peer s --compile
}

part_models() {
    measure b cublaslt
    peer b
    measure l cublaslt
    peer l
}

# Where the time of our step goes, by kernel: CubeCL times every launch of its own, which makes the step itself slower. Products of
# cuBLASLt are not among them.
profile() {
    # Read from the folder that the program is started in.
    printf '[profiling]\nlogger = { level = "medium", file = "%s" }\n' "$WORK/kernels.log" > "$WORK/cubecl.toml"
    (cd "$WORK" && "$OCELLI" bench step $1 --device "$DEVICE" --recipe "$PROFILED" --batch "$2" --repeats 2 --matrix 256 \
        --set 'optim.precision={compute="bf16"}' > /dev/null) &&
        python3 "$HERE/gpu_table.py" kernels "$WORK/kernels.log" | tee "$OUT/kernels.txt"
}

part_profile() {
    case $DRY in
        "") say "our step by kernel" 200 profile "" 64 ;;
        *) say "our step by kernel" 200 profile --unchecked 2 ;;
    esac
}

# ResNet-18 at 32 px: a pass of the backbone, which the peer measures too.
resnet() {
    "$OCELLI" bench step --backbone --device "$DEVICE" --recipe swav_cifar --batch 128 --repeats 5 --json \
        --set 'optim.precision={compute="bf16"}' | tee "$WORK/last" && tail -1 "$WORK/last" > "$OUT/resnet-ocelli.json"
}
resnet_peer() {
    python3 "$HERE/peer_step.py" --model resnet18 --batch 128 --image-px 32 --small-stem --channels-last --bf16 \
        --device "$DEVICE" | tee "$WORK/last" &&
        tail -1 "$WORK/last" > "$OUT/resnet-torch.json"
}

part_convolution() {
    # CubeCL tries out convolutions, which takes as long without a device as with one.
    compare "ocelli, ResNet-18, first start" 300 resnet
    compare "ocelli, ResNet-18" 60 resnet
    [ "$has_peer" = no ] || compare "PyTorch, ResNet-18" 60 resnet_peer
}

[ -x "$OCELLI" ] || { echo "no program at $OCELLI"; exit 2; }
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
"$OCELLI" --version
for part in "${PARTS[@]}"; do
    [ "$(type -t "part_$part")" = function ] || { echo "no part is named $part: see the first lines of $0"; exit 2; }
    [ ! -e "$OUT/$part.done" ] || { echo "== $part: done before"; continue; }
    export part
    start=$SECONDS
    rm -f "$OUT/$part.results"
    "part_$part"
    touch "$OUT/$part.done"
    echo "== $part: $((SECONDS - start)) s"
done

echo
cat "$OUT"/*.results > "$WORK/results"
python3 "$HERE/gpu_table.py" table "$OUT" "$WORK/results" "$OUT/results.json" | tee "$OUT/table.md" || exit 1
# What PyTorch does not end is no fault of ours.
! grep -v '^PyTorch' "$WORK/results" | grep -q 'WRONG\|NOT ENDED'
