#!/usr/bin/env bash
# From shards in a bucket, such as img2dataset writes, to a backbone. Nothing is copied beforehand: shards are
# fetched one window ahead and kept in a cache of limited size.
#
#   export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=...   # s3://
#   export GOOGLE_APPLICATION_CREDENTIALS=key.json                         # gs://
#   export AZURE_STORAGE_ACCOUNT_NAME=... AZURE_STORAGE_ACCOUNT_KEY=...    # az://
#   scripts/examples/from_bucket.sh 's3://bucket/set/{00000..00099}.tar' runs/set --recipe dino_vits16
#
# Arguments after the shard list and the folder go to `ocelli pretrain`. OCELLI_CACHE and OCELLI_CACHE_GB set
# the location and size of the cache.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ocelli=${OCELLI:-ocelli}
list=$1 out=$2
shift 2

# Shards without an index beside them are read once; their indices are kept in the cache.
"$ocelli" shards index "$list"
"$ocelli" pretrain --shards "$list" --workdir "$out/run" "$@"
"$ocelli" export --checkpoint "$out/run" --out "$out/backbone.safetensors" --overwrite
