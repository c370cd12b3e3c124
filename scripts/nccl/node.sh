#!/bin/bash
# Starts one rank for each GPU of this machine; they communicate with those of other machines over NCCL. Where
# torchrun is installed, `torchrun --no-python --nproc-per-node 8 ocelli pretrain …` does the same; this needs only a
# shell.
#
#   N_NODES=2 NODE=0 MASTER_ADDR=node0 MASTER_PORT=29500 \
#       scripts/nccl/node.sh pretrain --recipe dino_vits16 --shards 'train-{000000..000128}.tar' --workdir /runs/a
#
# NODE counts the machines from 0, and is the index of the pod in an indexed job of Kubernetes. GPUS says how many
# ranks to start; by default one for each GPU that Slurm allocated on this node, or, without Slurm, for each GPU of
# the machine. OCELLI names the program, built with `--features cuda`.
#
# TERM, USR2 and an interrupt are forwarded as USR2: all ranks together write one checkpoint. The exit code is 0 if
# all ranks exit with 0; otherwise a code below 128, which needs a person, takes precedence over one that means try
# again.

set -u
OCELLI=${OCELLI:-ocelli}
N_NODES=${N_NODES:-1}
NODE=${NODE:-${JOB_COMPLETION_INDEX:-0}}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-$(nvidia-smi --list-gpus | wc -l)}}
[ "$GPUS" -gt 0 ] || { echo "error: no GPU here: set GPUS, or under Slurm give --gpus-per-node" >&2; exit 2; }
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-29500}
export WORLD_SIZE=$((N_NODES * GPUS)) LOCAL_WORLD_SIZE=$GPUS
# The index counts pods, and ranks are what counts from here on.
unset JOB_COMPLETION_INDEX

ranks=()
# Before the first rank starts; what a script starts with & does not hear the keyboard.
trap '[ ${#ranks[@]} -eq 0 ] || kill -USR2 "${ranks[@]}" 2>/dev/null' TERM USR2 INT
for ((i = 0; i < GPUS; i++)); do
    RANK=$((NODE * GPUS + i)) LOCAL_RANK=$i "$OCELLI" "$@" &
    ranks+=($!)
done

code=0
for rank in "${ranks[@]}"; do
    # A signal ends `wait` early, with the rank still there.
    while wait "$rank"; ended=$?; kill -0 "$rank" 2>/dev/null; do :; done
    if [ "$code" -eq 0 ] || { [ "$code" -ge 128 ] && [ "$ended" -gt 0 ] && [ "$ended" -lt 128 ]; }; then
        code=$ended
    fi
done
exit "$code"
