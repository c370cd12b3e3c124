"""bytedance/ibot: the loss of `main_ibot.iBOTLoss` on given scores, centers and masks, with its gradient, in f64.

    python scripts/golden/official/ibot.py --ibot DIR
"""

import argparse
import ast
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

IMAGES, GLOBAL, LOCAL, CELLS, PROTOTYPES = 4, 2, 3, 9, 10
TEMPERATURE, PATCH_TEMPERATURE, MOMENTUM = 0.04, 0.05, 0.9


def official(path: Path):
    """The class alone: the module imports augmentations that need other packages."""
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "iBOTLoss"]
    names = {"nn": nn, "torch": torch, "np": np, "F": F, "dist": dist}
    exec(compile(ast.Module(found, []), str(path), "exec"), names)
    return names["iBOTLoss"]


def by_view(x: torch.Tensor) -> torch.Tensor:
    """`[B, V, ...]` as the official code has it: all images of a view after one another."""
    return x.transpose(0, 1).flatten(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ibot", type=Path, required=True)
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)

    loss = official(args.ibot / "main_ibot.py")(
        PROTOTYPES, PROTOTYPES, GLOBAL, LOCAL, TEMPERATURE, TEMPERATURE, PATCH_TEMPERATURE, PATCH_TEMPERATURE, 0, 1,
        center_momentum=MOMENTUM, center_momentum2=MOMENTUM)
    of = lambda *shape: torch.randn(IMAGES, *shape, PROTOTYPES) * 0.3
    given = {"teacher": of(GLOBAL), "teacher_cells": of(GLOBAL, CELLS), "student": of(GLOBAL), "student_cells": of(GLOBAL, CELLS),
             "student_local": of(LOCAL), "center": torch.randn(PROTOTYPES) * 0.1, "patch_center": torch.randn(PROTOTYPES) * 0.1}
    # Some views without masks, the others with different numbers of masked cells.
    masks = torch.rand(IMAGES, GLOBAL, CELLS) < torch.linspace(-0.3, 0.7, IMAGES * GLOBAL).reshape(IMAGES, GLOBAL, 1)
    loss.center.copy_(given["center"][None])
    loss.center2.copy_(given["patch_center"][None, None])
    students = {name: given[name].clone().requires_grad_() for name in ("student", "student_cells", "student_local")}
    side = int(CELLS**0.5)
    result = loss(
        (by_view(students["student"]), by_view(students["student_cells"])),
        (by_view(given["teacher"]), by_view(given["teacher_cells"])),
        by_view(students["student_local"]),
        masks.transpose(0, 1).reshape(GLOBAL, IMAGES, side, side), 0)
    result["loss"].backward()
    found = given | {"masks": masks, "loss": result["loss"].detach()[None], "center_after": loss.center[0],
                      "patch_center_after": loss.center2[0, 0]}
    found |= {f"{name}.grad": student.grad for name, student in students.items()}
    out = Path("tests/golden/official/ibot_loss.safetensors")
    save_file({name: value.float().contiguous() for name, value in found.items()}, out)
    print(out, float(result["loss"].detach()), int(masks.sum()), "cells masked")


if __name__ == "__main__":
    main()
