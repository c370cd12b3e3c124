#!/usr/bin/env bash
# From a list of image URLs to a backbone. The list is a .csv or .tsv with a column `url` (`label` and
# `caption` are kept), a .jsonl with the same keys, or a .txt with one URL per line.
#
#   scripts/examples/from_urls.sh images.csv runs/web --recipe dino_vits16
#
# Arguments after the list and the folder go to `ocelli pretrain`. Run it again to resume where it stopped;
# URLs that could not be fetched are listed with the reason in <folder>/packed/failures.jsonl.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ocelli=${OCELLI:-ocelli}
list=$1 out=$2
shift 2

"$ocelli" shards pack "$list" --urls --out "$out/packed" --connections 64 --per-host 8
# Half of what was not there yesterday is there today.
if [ -s "$out/packed/failures.jsonl" ]; then
    classes=()
    [ ! -e "$out/packed/classes.txt" ] || classes=(--classes "$out/packed/classes.txt")
    # 3 says that none of them came, which is no surprise.
    "$ocelli" shards pack "$out/packed/failures.jsonl" --urls --out "$out/again" --prefix again "${classes[@]}" ||
        [ $? -eq 3 ]
fi
fetched=("$out"/packed/*.tar)
shopt -s nullglob
fetched+=("$out"/again/*.tar)
"$ocelli" shards filter "${fetched[@]}" --out "$out/filtered" --min-side 32 --max-aspect 3
"$ocelli" shards dedup "$out"/filtered/*.tar --out "$out/shards" --remove
"$ocelli" shards stats "$out"/shards/*.tar
"$ocelli" pretrain --shards "$out"/shards/*.tar --workdir "$out/run" "$@"
"$ocelli" export --checkpoint "$out/run" --out "$out/backbone.safetensors" --overwrite
