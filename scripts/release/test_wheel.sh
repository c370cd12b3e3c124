#!/usr/bin/env bash
# Installs a wheel into a clean venv, without a compiler on PATH, and uses it.
#
#   scripts/release/test_wheel.sh OUT/ocelli-*.whl
#
# If the Python named by PYTHON has PyTorch and timm, `ocelli.load` is tested too.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv --system-site-packages venv
venv/bin/pip install --quiet --no-deps "$wheel"
# The packages of a venv that PYTHON lies in come after those of this one.
"${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
    >"$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/python.pth"
venv/bin/pip install --quiet numpy
export PATH="$folder/venv/bin:/usr/bin:/bin"
export OCELLI_CACHE="$folder/cache"
ocelli --version
ocelli quickstart --workdir run --train-images 200 --test-images 100 --set optim.length.steps=2 --set optim.batch_size=16 >/dev/null 2>&1
venv/bin/python - <<'PYTHON'
import sys

import ocelli

features, names = ocelli.embed("run", sorted(__import__("pathlib").Path("run").glob("*.png")))
assert features.ndim == 2 and len(features) == len(names) > 0, features.shape
print("embed:", features.shape, names[0])
run = ocelli.pretrain("quickstart", "run/data/train", "again", settings={"optim.length": {"steps": 2}, "optim.batch_size": 16})
assert run.steps == 2, run
print("pretrain:", run, run.metrics["train/loss"])
rows = ocelli.runs(".")
assert len(rows) == 2, rows
print("runs:", len(rows))
try:
    import timm, torch
except ImportError:
    print("left out: ocelli.load, for want of torch and timm")
    sys.exit()
module = ocelli.load("run")
px = module.preprocessing["size_px"]
out = module(torch.zeros(2, 3, px, px))
assert out.shape == (2, features.shape[1]), out.shape
print("load:", tuple(out.shape))
PYTHON
