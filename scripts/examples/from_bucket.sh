#!/usr/bin/env bash
# Shards in a bucket, such as img2dataset writes, into a backbone. Nothing is copied beforehand: shards are
# fetched a window ahead and kept in a cache of bounded size.
#
#   export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=...   # s3://
#   export GOOGLE_APPLICATION_CREDENTIALS=key.json                         # gs://
#   export AZURE_STORAGE_ACCOUNT_NAME=... AZURE_STORAGE_ACCOUNT_KEY=...    # az://
#   scripts/examples/from_bucket.sh 's3://bucket/set/{00000..00099}.tar' runs/set --recipe dino_vits16
#
# What follows the list and the folder goes to `ocelli pretrain`. OCELLI_CACHE and OCELLI_CACHE_GB say where
# the cache is and how large.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ocelli=${OCELLI:-ocelli}
list=$1 out=$2
shift 2

# Shards without an index beside them are read once; their indices are kept in the cache.
"$ocelli" shards index "$list"
"$ocelli" pretrain --shards "$list" --workdir "$out/run" "$@"
"$ocelli" export --checkpoint "$out/run" --out "$out/backbone.safetensors" --overwrite
