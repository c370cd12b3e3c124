"""facebookresearch/vissl: its SimCLR loss, heads, collator and training step, with ClassyVision's optimizer."""

import contextlib
import enum
import importlib
import sys
from pathlib import Path

import torch
import torch.nn as nn

from machine import machine, module, named, rename
from numbers_by_name import N_BATCHES, fill, views
from swav import Narrow, import_swav


def import_vissl(paths):
    """Single files of VISSL and ClassyVision: their packages import everything that they have."""
    import_swav(paths)
    classy, vissl = Path(paths.classy) / "classy_vision", Path(paths.vissl) / "vissl"
    if str(paths.classy) not in sys.path:
        sys.path.insert(0, str(paths.classy))
    same = lambda *_: lambda value: value
    module("classy_vision.tasks", classy / "tasks", ClassyTask=type("ClassyTask", (), {}))
    module("classy_vision.tasks.classification_task", AmpType=enum.Enum("AmpType", ["APEX", "PYTORCH"]))
    for name in ("", ".losses", ".utils", ".data", ".trainer", ".models"):
        module(f"vissl{name}", vissl / name.strip(".").replace(".", "/"))
    module("vissl.data.collators", vissl / "data/collators", register_collator=same)
    module("vissl.models.heads", vissl / "models/heads", register_model_head=same)
    module("vissl.trainer.train_steps", vissl / "trainer/train_steps", register_train_step=same)
    hooks = ["on_forward", "on_loss_and_meter", "on_backward", "on_update"]
    module("vissl.hooks", SSLClassyHookFunctions=enum.Enum("SSLClassyHookFunctions", hooks))
    module("vissl.utils.activation_checkpointing", manual_gradient_all_reduce=None, manual_sync_params=None)
    module("vissl.utils.fsdp_utils", is_fsdp_model=lambda _: False, fsdp_auto_wrap_bn=None, fsdp_wrapper=None)
    module("vissl.utils.misc", is_apex_available=lambda: False, torch_version=lambda: (2, 0, 0))
    module("vissl.utils.profiler", record_function=lambda _: contextlib.nullcontext())
    module("vissl.config", vissl / "config")
    attr_dict = importlib.import_module("vissl.config.attr_dict")
    sys.modules["vissl.config"].AttrDict = attr_dict.AttrDict
    names = ["losses.simclr_info_nce_loss", "models.heads.mlp", "data.collators.simclr_collator",
             "trainer.train_steps.standard_train_step"]
    return attr_dict.AttrDict, [importlib.import_module(f"vissl.{name}") for name in names]


SIMCLR = rename((r"^trunk\.", ""), (r"^heads\.0\.clf\.0\.", "head.projection.linear0."),
                (r"^heads\.1\.clf\.0\.", "head.projection.linear1."))


def simclr(paths):
    run, width, batch, groups, n_steps = "simclr", 4, 16, [(2, 64)], 12
    AttrDict, (loss_file, mlp_file, collator_file, step_file) = import_vissl(paths)
    from classy_vision.optim import build_optimizer, build_optimizer_schedulers
    _, resnets = import_swav(paths)

    class Model(nn.Module):
        """A trunk and the two heads of configs/config/pretrain/simclr/simclr_8node_resnet.yaml."""

        def __init__(self):
            super().__init__()
            self.trunk = resnets.ResNet(resnets.BasicBlock, [1, 1, 1, 1], widen=Narrow(width))
            config = AttrDict({"HEAD": {"PARAMS_MULTIPLIER": 1.0}})
            first = dict(dims=[8 * width, 12], use_relu=True, skip_last_layer_relu_bn=False)
            self.heads = nn.Sequential(mlp_file.MLP(config, **first), mlp_file.MLP(config, dims=[12, 8]))

        def forward(self, x):
            return [self.heads(self.trunk(x))]

    with machine([]):
        model = Model()
        fill(model, SIMCLR)
        loss = loss_file.SimclrInfoNCELoss.from_config(AttrDict({
            "temperature": 0.1,
            "buffer_params": {"embedding_dim": 8, "world_size": 1, "effective_batch_size": 2 * batch}}))
        # The file's masks are made by a machine with a GPU, and classy_vision says that there is one.
        config = {"name": "sgd", "use_larc": True, "weight_decay": 0.01, "momentum": 0.9, "nesterov": False,
                  "larc_config": {"clip": False, "trust_coefficient": 0.001, "eps": 1e-8}, "num_epochs": 1,
                  "param_schedulers": {"lr": {"name": "cosine", "start_value": 0.6, "end_value": 0.0,
                                              "update_interval": "step"}}}
        optimizer = build_optimizer(config)
        optimizer.set_param_groups(list(model.parameters()), **build_optimizer_schedulers(config))

        def batches():
            for step in range(n_steps):
                one, two = views(run, step % N_BATCHES, batch, groups)
                yield collator_file.simclr_collator([
                    {"data": [one[i], two[i]], "label": [i, i], "data_valid": [1, 1], "data_idx": [i, i]}
                    for i in range(batch)])

        task = step_file.ClassyTask()
        task.__dict__.update(
            perf_stats=None, train=True, enable_manual_gradient_reduction=False, amp_type=None, meters=[], losses=[],
            data_iterator=batches(), data_and_label_keys={"input": ["data"], "target": ["label"]}, model=model, loss=loss,
            optimizer=optimizer, num_updates=0, run_hooks=lambda _: None, get_global_batchsize=lambda: batch)
        model.train()
        train_step = step_file.StandardTrainStep()
        for step in range(n_steps):
            task.where = step / n_steps
            train_step(task)
    losses = [value / (2 * batch) for value in task.losses]
    return named("student", model.state_dict(), SIMCLR) | {"loss": torch.tensor(losses)}
