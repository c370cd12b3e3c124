#!/bin/bash
# A two-node Slurm cluster on this machine, for testing the other scripts in this folder: network namespaces on a virtual switch,
# with a slurmd in each. Needs root, and Debian's packages slurm-wlm and munge, or others that put the same programs on the path.
#
#   scripts/slurm/small_cluster.sh up FOLDER       start it; logs and state are in FOLDER
#   scripts/slurm/small_cluster.sh cut 2           take node 2 off the network
#   scripts/slurm/small_cluster.sh mend 2          put it back
#   scripts/slurm/small_cluster.sh down FOLDER     stop it; FOLDER stays
#
# Commands find the cluster by SLURM_CONF=FOLDER/slurm.conf. Jobs in the partition `urgent` preempt those in `main`. Slurm can
# allocate three fake GPUs on each node. Both nodes see the files of this machine, except /run/ocelli-node, which is separate on
# each.

set -eu
SUBNET=10.78.0
NODES=(1 2)
GPUS_PER_NODE=3

fail() {
    echo "small_cluster.sh: $*" >&2
    exit 2
}

up() {
    local folder=$1
    [ "$(id -u)" = 0 ] || fail "network namespaces need root"
    for program in slurmctld slurmd munged ip nsenter unshare; do
        command -v "$program" > /dev/null || fail "$program is missing: apt-get install slurm-wlm munge iproute2"
    done
    ip link show ocelli-switch > /dev/null 2>&1 && fail "a cluster is up on this machine: down FOLDER stops it"
    mkdir -p "$folder/state" /run/ocelli-node
    folder=$(cd "$folder" && pwd)
    network
    # A key and a socket of its own: the machine's munge, if it has one, is left alone.
    dd if=/dev/urandom bs=1024 count=1 of="$folder/munge.key" status=none
    chmod 600 "$folder/munge.key"
    chmod go-w "$folder"
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
    configuration "$folder" > "$folder/slurm.conf"
    # Fake GPUs, which Slurm can give to jobs. It requires device files.
    for gpu in $(seq 0 $((GPUS_PER_NODE - 1))); do ln -sf /dev/null "$folder/gpu$gpu"; done
    echo "Name=gpu File=$folder/gpu[0-$((GPUS_PER_NODE - 1))] Flags=nvidia_gpu_env" > "$folder/gres.conf"
    export SLURM_CONF="$folder/slurm.conf"
    slurmctld
    for node in "${NODES[@]}"; do
        mkdir -p "$folder/spool-node$node"
        # PMIx makes a folder by the number of the job, which two nodes cannot share.
        nsenter --net="/run/netns/ocelli-node$node" unshare --mount --uts -- bash -c "
            hostname node$node
            mount -t tmpfs tmpfs /run/ocelli-node
            exec slurmd -N node$node"
    done
    for _ in $(seq 60); do
        [ "$(sinfo --noheader --partition=main --states=idle --format=%D)" = "${#NODES[@]}" ] && return
        sleep 0.5
    done
    sinfo >&2
    fail "the nodes do not get ready: see $folder/*.log"
}

network() {
    ip link add ocelli-switch type bridge
    ip addr add $SUBNET.254/24 dev ocelli-switch
    ip link set ocelli-switch up
    for node in "${NODES[@]}"; do
        ip netns add "ocelli-node$node"
        ip link add "ocelli-port$node" type veth peer name eth0 netns "ocelli-node$node"
        ip link set "ocelli-port$node" master ocelli-switch up
        ip -n "ocelli-node$node" addr add "$SUBNET.$node/24" dev eth0
        ip -n "ocelli-node$node" link set eth0 up
        ip -n "ocelli-node$node" link set lo up
    done
}

configuration() {
    cat << END
ClusterName=small
SlurmctldHost=$(hostname -s)($SUBNET.254)
AuthType=auth/munge
AuthInfo=socket=$1/munge.socket
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile=$1/slurmctld.pid
SlurmdPidFile=$1/slurmd-%n.pid
SlurmctldLogFile=$1/slurmctld.log
SlurmdLogFile=$1/slurmd-%n.log
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool-%n
TmpFS=/run/ocelli-node
# No cgroups, so that it runs in containers as well.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldTimeout=20
SlurmdTimeout=20
ReturnToService=2
KillWait=20
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2
END
    for node in "${NODES[@]}"; do
        echo "NodeName=node$node NodeAddr=$SUBNET.$node CPUs=$(nproc) RealMemory=4000 Gres=gpu:$GPUS_PER_NODE State=UNKNOWN"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1"
    echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10"
}

down() {
    local pid
    for pid in "$1"/slurmctld.pid "$1"/slurmd-*.pid "$1"/munged.pid; do
        [ -f "$pid" ] && kill "$(cat "$pid")" 2> /dev/null || true
    done
    for pid in "$1"/slurmctld.pid "$1"/munged.pid; do
        for _ in $(seq 100); do
            [ -f "$pid" ] && kill -0 "$(cat "$pid")" 2> /dev/null || break
            sleep 0.1
        done
    done
    for node in "${NODES[@]}"; do
        ip netns pids "ocelli-node$node" 2> /dev/null | xargs --no-run-if-empty kill -9 || true
        # A deleted namespace takes its ports with it some time later.
        ip link del "ocelli-port$node" 2> /dev/null || true
        ip netns del "ocelli-node$node" 2> /dev/null || true
    done
    ip link del ocelli-switch 2> /dev/null || true
    rmdir /run/ocelli-node 2> /dev/null || true
}

case ${1:-} in
    up) up "${2:?a folder for logs and state}" ;;
    cut) ip link set "ocelli-port${2:?number of a node}" down ;;
    mend) ip link set "ocelli-port${2:?number of a node}" up ;;
    down) down "${2:?the folder that up was given}" ;;
    *) fail "up FOLDER, cut NODE, mend NODE or down FOLDER" ;;
esac
