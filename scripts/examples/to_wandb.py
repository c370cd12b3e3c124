"""Logs a run to Weights & Biases: python to_wandb.py runs/mine (pip install wandb).

It reads what the run has written, so that the run neither waits for it nor fails with it.
"""

import json
import pathlib
import sys

import wandb

workdir = pathlib.Path(sys.argv[1])
plan = (workdir / "plan.toml").read_text()
run = wandb.init(project="ocelli", name=workdir.resolve().name, config={"plan": plan})
for line in (workdir / "metrics.jsonl").open():
    if not line.endswith("\n"):  # The run is writing it.
        break
    row = json.loads(line)
    step = row.pop("step") + 1
    run.log({name: value for name, value in row.items() if value is not None}, step=step)
for picture in sorted(workdir.glob("*.png")):
    run.summary[picture.stem] = wandb.Image(str(picture))
run.finish()
