#!/usr/bin/env bash
# From a folder of images to a backbone: packs shards without broken images and duplicates, at a size that loads fast.
#
#   scripts/examples/from_folder.sh photos/ runs/photos --recipe dino_vits16 --set optim.batch_size=64
#
# Arguments after the two folders go to `ocelli pretrain`. Run it again to resume where it stopped.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ocelli=${OCELLI:-ocelli}
images=$1 out=$2
shift 2
mkdir -p "$out"

# An interrupted packing job is not resumed: what it left behind is removed.
if [ ! -e "$out/packed.done" ]; then
    rm -rf "$out/packed"
    "$ocelli" shards pack "$images" --out "$out/packed"
    touch "$out/packed.done"
fi
"$ocelli" shards filter "$out"/packed/*.tar --out "$out/filtered" --min-side 32
"$ocelli" shards dedup "$out"/filtered/*.tar --out "$out/distinct" --remove
# Crops of 224 px need no more than this; large photographs load several times faster.
"$ocelli" shards resize "$out"/distinct/*.tar --out "$out/shards" --short-side 512 --baseline
"$ocelli" shards stats "$out"/shards/*.tar
"$ocelli" pretrain --shards "$out"/shards/*.tar --workdir "$out/run" "$@"
"$ocelli" export --checkpoint "$out/run" --out "$out/backbone.safetensors" --overwrite
