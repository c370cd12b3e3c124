#!/usr/bin/env bash
# What a release consists of, below OUT: a wheel, and a stripped archive with completions and manual pages, with checksums.
#
#   scripts/release/build.sh OUT
#
# Needs maturin (pip install maturin). The wheel's program is linked against the C library of this machine: build on the
# oldest system that is to run it, as in scripts/release/Dockerfile.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/../.."
mkdir -p "$1"
out=$(cd "$1" && pwd)
target=${CARGO_TARGET_DIR:-target}

cargo build --release --package scripts
program=$target/release/ocelli
name="ocelli-$("$program" --version | cut -d' ' -f2)-$(uname -s | tr '[:upper:]' '[:lower:]')-$(uname -m)"
folder=$(mktemp -d)/$name
mkdir -p "$folder/completions" "$folder/man"
install -m 755 "$program" "$folder/ocelli"
cp README.md CHANGELOG.md LICENSE "$folder"
for shell in bash zsh fish; do
    "$program" completions "$shell" >"$folder/completions/ocelli.$shell"
done
"$program" man --out "$folder/man" >/dev/null
# The same files give the same bytes.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime='2026-01-01 00:00Z' -C "$(dirname "$folder")" -cf - "$name" |
    gzip -9n >"$out/$name.tar.gz"

maturin build --release --manifest-path scripts/Cargo.toml --out "$out" --compatibility linux
(cd "$out" && sha256sum ./*.tar.gz ./*.whl >SHA256SUMS)
ls -l "$out"
