#!/usr/bin/env bash
# Builds a release in OUT: a wheel for every Linux with glibc 2.28 or newer (manylinux_2_28), and an archive of the same program
# with completions, manual pages, recipes, pages and scripts, with checksums.
#
#   pip install maturin ziglang auditwheel
#   scripts/release/build.sh OUT
#
# zig compiles and links the C parts against the symbols of glibc 2.28, whatever version this machine has. Further flags for
# maturin, such as those for CUDA (CONTRIBUTING.md), follow OUT.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/../.."
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift

# The program first, as a wheel of its own, out of which it goes into that of the module.
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked" scripts/python/ocelli.data' EXIT
rm -rf scripts/python/ocelli.data && mkdir -p scripts/python/ocelli.data/scripts
maturin build --release --bindings bin --manifest-path scripts/Cargo.toml --out "$unpacked/program" --compatibility manylinux_2_28 --zig "$@"
python3 -m zipfile -e "$unpacked"/program/*.whl "$unpacked/program"
install -m 755 "$(ls "$unpacked"/program/*.data/scripts/ocelli)" scripts/python/ocelli.data/scripts/ocelli
maturin build --release --manifest-path scripts/python/Cargo.toml --out "$out" --compatibility manylinux_2_28 --zig "$@"
wheel=$(ls -t "$out"/ocelli-*.whl | head -n 1)
tag=$(auditwheel show "$wheel")
echo "$tag"
case $(echo "$tag" | tr '\n' ' ') in
*'constrains the platform tag to "manylinux_2_28'* | *'constrains the platform tag to "manylinux_2_1'*) ;;
*) echo "error: the wheel needs a newer glibc than 2.28" >&2 && exit 1 ;;
esac

# The program of the wheel, so that both are the same.
python3 -m zipfile -e "$wheel" "$unpacked"
program=$(ls "$unpacked"/ocelli-*.data/scripts/ocelli)
chmod 755 "$program"
name="ocelli-$("$program" --version | cut -d' ' -f2)-$(uname -s | tr '[:upper:]' '[:lower:]')-$(uname -m)"
folder=$unpacked/$name
mkdir -p "$folder/completions" "$folder/man" "$folder/scripts"
install -m 755 "$program" "$folder/ocelli"
cp README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md LICENSE "$folder"
# What the README and its pages link to.
cp -R docs "$folder"
for part in examples recipes kubernetes mpi nccl slurm; do
    cp -R "scripts/$part" "$folder/scripts"
done
for shell in bash zsh fish; do
    "$program" completions "$shell" >"$folder/completions/ocelli.$shell"
done
"$program" man --out "$folder/man" >/dev/null
# The same files give the same bytes.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime='2026-01-01 00:00Z' -C "$unpacked" -cf - "$name" |
    gzip -9n >"$out/$name.tar.gz"
(cd "$out" && sha256sum ./*.tar.gz ./*.whl >SHA256SUMS)
ls -l "$out"
