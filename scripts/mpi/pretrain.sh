#!/bin/bash
# A pretraining run by Open MPI's mpirun, on this machine or on the hosts of a file, that is started again
# while there is hope:
#
#   scripts/mpi/pretrain.sh 2 --recipe dino_cifar --shards 'cifar/train-{000000..000009}.tar' --workdir runs/a
#   HOSTFILE=hosts scripts/mpi/pretrain.sh 16 --recipe dino_vits16 ...
#
# The first argument is the number of ranks; the rest is given to `ocelli pretrain`. The work directory must
# be one that all hosts see. OCELLI names the program, built with `--features mpi`.

set -u
ranks=${1:?number of ranks}
shift
OCELLI=${OCELLI:-ocelli}
MAX_RESTARTS=${MAX_RESTARTS:-20}

options=(-n "$ranks")
# A rank that waits gives its core away: its own worker and data threads want it.
options+=(--mca mpi_yield_when_idle 1)
# Ranks divide the cores among themselves; mpirun would bind each to one core.
options+=(--bind-to none)
# A rank that dies is for the others to name: mpirun would end them within a second.
options+=(--enable-recovery)
# The same second is what mpirun gives ranks that it is told to end, which want to write a checkpoint.
options+=(--mca odls_base_sigkill_timeout 300)
[ -n "${HOSTFILE:-}" ] && options+=(--hostfile "$HOSTFILE")
[ -z "${HOSTFILE:-}" ] && options+=(--oversubscribe)

for restart in $(seq 0 "$MAX_RESTARTS"); do
    mpirun "${options[@]}" "$OCELLI" pretrain "$@"
    code=$?
    # 143 is a stop that somebody has asked for; 2, 3 and 78 would only come again.
    case $code in
        134 | 137 | 139) echo "exit code $code; starting again ($((restart + 1)) of at most $MAX_RESTARTS)" >&2 ;;
        *) exit "$code" ;;
    esac
    sleep 5
done
exit "$code"
