#!/usr/bin/env bash
# From nothing to tested: clones the repository, runs README's first command and then its tests, and prints wall and CPU
# seconds of each. Dependencies are downloaded before anything is timed.
#
# Usage: scripts/bench/first_hour.sh [REPOSITORY [REVISION]]
set -euo pipefail

repository=${1:-$(git -C "$(dirname "$0")" rev-parse --show-toplevel)}
revision=${2:-HEAD}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

git clone --quiet "$repository" "$folder/ocelli"
cd "$folder/ocelli"
git checkout --quiet "$(git -C "$repository" rev-parse "$revision" 2>/dev/null || echo "$revision")"
cargo fetch --quiet --locked
# A clone that is built once gains nothing from incremental compilation.
export CARGO_INCREMENTAL=0

echo "$(git rev-parse --short HEAD) on $(nproc) cores,$(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2-)"

# timed NAME COMMAND…: runs the command, and prints its wall seconds and the CPU seconds of all of its processes.
timed() {
    local name=$1 times
    shift
    if ! times=$({ TIMEFORMAT='%R %U %S'; time "$@" >"$folder/log" 2>&1; } 2>&1); then
        tail -n 30 "$folder/log"
        echo "failed: $*"
        exit 1
    fi
    read -r wall user system <<<"$times"
    awk -v name="$name" -v wall="$wall" -v user="$user" -v system_s="$system" \
        'BEGIN { printf "%-44s %7.0f s wall %7.0f s CPU\n", name, wall, user + system_s }'
}

timed "cargo build --release" cargo build --release
ls -l target/release/ocelli | awk '{ printf "%-44s %7.1f MB\n", "target/release/ocelli", $5 / 1e6 }'
timed "cargo run --release -- quickstart" cargo run --release -- quickstart
timed "cargo test --workspace --no-run" cargo test --workspace --no-run
timed "cargo test --workspace" cargo test --workspace
