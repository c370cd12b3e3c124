#!/bin/bash
# A pretraining run under Open MPI's mpirun, on this machine or on the hosts in a file, that is restarted as
# long as a restart can help:
#
#   scripts/mpi/pretrain.sh 2 --recipe dino_cifar --shards 'cifar/train-{000000..000009}.tar' --workdir runs/a
#   HOSTFILE=hosts scripts/mpi/pretrain.sh 16 --recipe dino_vits16 ...
#
# The first argument is the number of ranks; the rest is passed to `ocelli pretrain`. All hosts must see the
# work directory. OCELLI names the program, built with `--features mpi`.

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
# To stop a run, send USR2 to mpirun, which hands it on: all ranks write a checkpoint and end with 143. On TERM
# mpirun gives them one second. (Not --enable-recovery: mpirun says 0 then, whatever happened.)
[ -n "${HOSTFILE:-}" ] && options+=(--hostfile "$HOSTFILE")
[ -z "${HOSTFILE:-}" ] && options+=(--oversubscribe)

for restart in $(seq 0 "$MAX_RESTARTS"); do
    mpirun "${options[@]}" "$OCELLI" pretrain "$@"
    code=$?
    # 143 is a stop that somebody has asked for; 2, 3 and 78 would only come again.
    case $code in
        134 | 137 | 139) ;;
        *) exit "$code" ;;
    esac
    [ "$restart" -eq "$MAX_RESTARTS" ] && break
    echo "exit code $code; starting again ($((restart + 1)) of at most $MAX_RESTARTS)" >&2
    sleep 5
done
exit "$code"
