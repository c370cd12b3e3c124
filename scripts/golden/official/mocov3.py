"""facebookresearch/moco-v3: `main_moco.train` with its model, its transformer, its LARS and its schedules."""

import contextlib
import importlib
import importlib.util
import io
import sys
import types
from functools import partial

import timm.layers
import torch
import torch.nn as nn
import torchvision.models.resnet as resnets

from machine import machine, module, rename
from numbers_by_name import N_BATCHES, fill, views


def heads(head: str) -> list[tuple[str, str]]:
    """Names of the layers of a sequence of linear layers, norms and rectifiers."""
    rules = []
    for place, name in enumerate(["linear0", "norm0", "relu", "linear1", "norm1", "relu", "linear2", "norm2"]):
        rules.append((rf"^{head}\.{place}\.", f"projector.mlp.{name}."))
    return rules


PREDICTOR = [(r"^predictor\.0\.", "predictor.mlp.linear0."), (r"^predictor\.1\.", "predictor.mlp.norm0."),
             (r"^predictor\.3\.", "predictor.mlp.linear1."), (r"^predictor\.4\.", "predictor.mlp.norm1.")]


def import_moco(paths):
    """The code is of a timm that had other modules."""
    module("timm.models.layers", PatchEmbed=timm.layers.PatchEmbed)
    module("timm.models.layers.helpers", to_2tuple=timm.layers.to_2tuple)
    if importlib.util.find_spec("tensorboard") is None:
        module("torch.utils.tensorboard", SummaryWriter=None)
    if str(paths.moco) not in sys.path:
        sys.path.insert(0, str(paths.moco))
    return [importlib.import_module(name) for name in ("main_moco", "moco.builder", "moco.optimizer", "vits")]


class Small(resnets.ResNet):
    """ResNet-10 of torchvision's code that begins with four channels."""

    def __init__(self, num_classes: int, width: int = 4) -> None:
        self.width = width
        super().__init__(resnets.BasicBlock, [1, 1, 1, 1])
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(8 * width, num_classes)

    def _make_layer(self, block, planes, *args, **kwargs):
        if planes == 64:
            self.inplanes = self.width
        return super()._make_layer(block, planes * self.width // 64, *args, **kwargs)


def moco(paths, run: str, optimizer_name: str, warmup_epochs: int, temperature: float):
    main_moco, builder, optimizers, vits = import_moco(paths)
    batch, epochs, per_epoch = 16, 3, 4
    is_vit = optimizer_name == "adamw"

    class Transformer(vits.VisionTransformerMoCo):
        num_tokens = 1

    def vit(num_classes):
        return Transformer(stop_grad_conv1=True, img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, mlp_ratio=2,
                           qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6), num_classes=num_classes)

    learned = rename((r"^base_encoder\.", ""), *PREDICTOR)
    of_head = rename(*heads("head" if is_vit else "fc"))
    name_here = lambda name: None if learned(name) is None else of_head(learned(name))
    losses = []
    with machine([]):
        model = (builder.MoCo_ViT(vit, 8, 12, temperature) if is_vit else builder.MoCo_ResNet(Small, 8, 12, temperature))
        # Positions are a formula, and the average begins where the network does.
        fill(model, lambda name: None if name.startswith("momentum_encoder") or name.endswith("pos_embed") else name_here(name))
        model.momentum_encoder.load_state_dict(model.base_encoder.state_dict())
        args = types.SimpleNamespace(
            epochs=epochs, warmup_epochs=warmup_epochs, lr=0.02, moco_m=0.9, moco_m_cos=True, gpu=None, rank=0,
            print_freq=100)
        optimizer = (torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.1) if optimizer_name == "adamw"
                     else optimizers.LARS(model.parameters(), args.lr, weight_decay=0.01, momentum=0.9))
        scaler = types.SimpleNamespace(scale=lambda loss: loss, step=lambda optimizer: optimizer.step(), update=lambda: None)
        writer = types.SimpleNamespace(add_scalar=lambda name, loss, step: losses.append(loss))
        data = [(views(run, i, batch, [(1, 32 if is_vit else 64)] * 2), None) for i in range(N_BATCHES)]
        model.train()
        with contextlib.redirect_stdout(io.StringIO()):
            for epoch in range(epochs):
                loader = [data[(epoch * per_epoch + i) % N_BATCHES] for i in range(per_epoch)]
                main_moco.train(loader, model, optimizer, scaler, writer, epoch, args)
        state = model.state_dict()
    out = {"loss": torch.tensor(losses)}
    for name, value in state.items():
        if name.endswith("num_batches_tracked"):
            continue
        network, own = ("momentum", name.replace("momentum_encoder", "base_encoder")) if name.startswith("momentum_encoder") else ("base", name)
        out[f"{network}.{name_here(own)}"] = value.detach().clone()
    return out
