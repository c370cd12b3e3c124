#!/bin/bash
# Checks whether a network works, how fast it is, and what the sharding modes cost on it.
#
#   scripts/mpi/bench.sh 4 --recipe dino_vits16 --batch 16
#
# The first argument is the number of ranks; the rest is passed to `ocelli bench shard`.

set -eu
ranks=${1:?number of ranks}
shift
OCELLI=${OCELLI:-ocelli}
options=(-n "$ranks" --mca mpi_yield_when_idle 1 --bind-to none)
[ -n "${HOSTFILE:-}" ] && options+=(--hostfile "$HOSTFILE")
[ -z "${HOSTFILE:-}" ] && options+=(--oversubscribe)

mpirun "${options[@]}" "$OCELLI" doctor --fabric
mpirun "${options[@]}" "$OCELLI" bench shard "$@"
