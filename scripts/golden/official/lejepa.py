"""rbalestr-lab/lejepa: the listing of MINIMAL.md."""

import os
import re
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from machine import Loader, Samples, machine, module, named
from numbers_by_name import N_BATCHES, directions, fill, views


def lejepa_name(name: str) -> str | None:
    if name.endswith("num_batches_tracked"):
        return None
    found = re.match(r"^proj\.(\d+)\.(.*)$", name)
    if found:
        layer, part = divmod(int(found[1]), 4)
        return f"head.projection.{['linear', 'norm'][part]}{layer}.{found[2]}"
    return name.removeprefix("backbone.")


def lejepa(paths, run: str, center: str):
    """The listing of MINIMAL.md, all of it; where the center is that of the global views, one expression is another:
    `proj.mean(0)`, the mean over all views, becomes `proj[:2].mean(0)`, as the paper's listing has it."""
    from timm.models.vision_transformer import VisionTransformer
    text = Path(paths.lejepa, "MINIMAL.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S)[:3])
    if center == "global":
        assert code.count("proj.mean(0)") == 1
        code = code.replace("proj.mean(0)", "proj[:2].mean(0)")
    batch, n_steps, lamb, losses, networks = 16, 20, 0.05, [], []
    groups = [(2, 32), (2, 16)] if center == "global" else [(3, 32)]
    stubs = {
        "wandb": dict(init=lambda **_: None, log=lambda row: losses.append(row["train/lejepa"]) if "train/lejepa" in row
                      else None, finish=lambda: None),
        "hydra": dict(main=lambda **_: lambda f: f), "omegaconf": dict(DictConfig=dict), "datasets": dict(load_dataset=None),
    }
    for name, content in stubs.items():
        module(name, **content)
    space = {"__name__": "minimal"}
    exec(compile(code, "MINIMAL.md", "exec"), space)

    class Views(list):
        """Views of several sizes, in the place of one tensor `[N, V, 3, S, S]`."""

        def to(self, *_, **__):
            return self

    class Encoder(space["ViTEncoder"]):
        """The listing's, of another size; its probe, which trains nothing here, takes 512 channels."""

        def __init__(self, proj_dim):
            nn.Module.__init__(self)
            self.backbone = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, mlp_ratio=2.0,
                                              num_classes=0, dynamic_img_size=True)
            self.proj = space["MLP"](24, [16, 16, proj_dim], norm_layer=nn.BatchNorm1d)
            fill(self, lejepa_name)
            networks.append(self)

        def forward(self, x):
            if not isinstance(x, Views):
                emb, proj = super().forward(x)
                return F.pad(emb, (0, 512 - 24)), proj
            # Multi-crop, as in stable_pretraining/methods/lejepa.py: sizes apart, the projector on all.
            emb = torch.cat([self.backbone(torch.cat(size)) for size in (x[:2], x[2:])])
            proj = self.proj(emb).view(len(x), len(x[0]), -1)
            return F.pad(emb, (0, 512 - 24)).view(len(x), len(x[0]), -1).transpose(0, 1).flatten(0, 1), proj

    data = [views(run, i, batch, groups) for i in range(N_BATCHES)]
    of_batch = lambda all: Views(all) if center == "global" else torch.stack(all, 1)
    labels = torch.arange(batch)
    epochs = [[(of_batch(data[step % N_BATCHES]), labels)] for step in range(n_steps)]
    loaders = iter([Loader(epochs), []])
    space |= {"ViTEncoder": Encoder, "HFDataset": lambda *_, **__: Samples(range(batch)),
              "DataLoader": lambda *_, **__: next(loaders)}
    config = type("Config", (dict,), {"__getattr__": dict.__getitem__})
    drawn = iter(range(n_steps))
    # The listing's first epoch, of one step here, is its warm-up from a hundredth; its cosine ends at 1e-3.
    with machine([]) as mode:
        os.environ["TQDM_DISABLE"] = "1"
        mode.randn = lambda d, m: directions(0, next(drawn), m, d)
        space["main"](config(V=sum(n for n, _ in groups), lamb=lamb, bs=batch, lr=2e-3, proj_dim=8, epochs=n_steps))
    [network] = networks
    assert len(losses) == n_steps and next(drawn, None) is None
    return named("student", network.state_dict(), lejepa_name) | {"loss": torch.tensor(losses)}
