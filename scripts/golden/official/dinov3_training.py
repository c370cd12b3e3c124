"""facebookresearch/dinov3: all of `train.do_train` with `SSLMetaArch`, on masks that trainer's mask.rs draws.

Exact masks, Sinkhorn and Knopp, plain last layers, a weight of local pairs, KoLeo, and Gram anchoring with a ramp and a limit of updates.
Nothing of that repository is kept here but the numbers that it computes."""

import importlib
import os
import sys
import types

import torch
import torch.nn as nn

from dinov2_training import BATCH, masks
from machine import machine, module, rename
from numbers_by_name import N_BATCHES, fill, views

D, DEPTH, HEADS, PATCH, SIZE, LARGER, LOCAL = 24, 2, 2, 8, 32, 64, 2
PER_EPOCH, EPOCHS = 2, 6

RENAMED = rename((r"^dino_head\.", "head."), (r"^ibot_head\.", "patch_head."), (r"^backbone\.storage_tokens", "reg_token"),
                 (r"^backbone\.", ""))


def name_here(name: str) -> str | None:
    """Name of a parameter here; none for buffers."""
    return None if "rope_embed" in name or name.endswith("bias_mask") else RENAMED(name)


def import_dinov3(paths):
    """The modules of the official code, without its loaders and its checkpoints."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if str(paths.dinov3) not in sys.path:
        sys.path.insert(0, str(paths.dinov3))
    every = lambda *_, **__: None

    class MetricLogger:
        def __init__(self, **_) -> None:
            self.meters = {}

        def log_every(self, data, **_):
            return iter(data)

        def update(self, **_) -> None:
            pass

        def synchronize_between_processes(self) -> None:
            pass

    names = ("find_latest_checkpoint", "keep_checkpoint_copy", "keep_last_n_checkpoints", "load_checkpoint", "register_dont_save_hooks",
             "save_checkpoint", "init_fsdp_model_from_checkpoint", "init_model_from_checkpoint_for_evals")
    module("dinov3.checkpointer", **{name: every for name in names})
    names = ("MaskingGenerator", "collate_data_and_cast", "make_data_loader", "make_dataset", "CombinedDataLoader", "DataAugmentationDINO")
    module("dinov3.data", SamplerType=types.SimpleNamespace(), **{name: every for name in names})
    module("dinov3.logging", MetricLogger=MetricLogger, setup_logging=every, cleanup_logging=every)
    module("dinov3.fsdp.ac_compile_parallelize", ac_compile_parallelize=every)
    names = ("train.train", "train.ssl_meta_arch", "models", "models.vision_transformer")
    return [importlib.import_module(f"dinov3.{name}") for name in names]


def config(paths, folder: str):
    from omegaconf import OmegaConf

    head = {"head_nlayers": 3}
    # As in the configuration of the stage with Gram anchoring.
    falling = {"start": 1.0, "peak": 1.0, "end": 0.5, "warmup_epochs": 0, "cosine_epochs": 2}
    ours = {
        "student": {"arch": "vit_golden", "patch_size": PATCH, "layerscale": 0.5, "n_storage_tokens": 2, "mask_k_bias": True,
                    "drop_path_rate": 0.0, "ffn_layer": "mlp", "norm_layer": "layernorm",
                    "pos_embed_rope_base": 100.0, "pos_embed_rope_rescale_coords": None},
        "crops": {"global_crops_size": SIZE, "local_crops_size": 16, "local_crops_number": LOCAL, "gram_teacher_crops_size": LARGER},
        "dino": head | {"head_n_prototypes": 16, "head_bottleneck_dim": 8, "head_hidden_dim": 12, "koleo_loss_weight": 0.1,
                        "koleo_loss_distributed": False, "global_ignore_diagonal": True, "reweight_dino_local_loss": True,
                        "local_loss_weight_schedule": falling},
        "ibot": head | {"head_n_prototypes": 20, "head_bottleneck_dim": 6, "head_hidden_dim": 10, "separate_head": True,
                        "loss_weight": 1.0},
        "gram": {"use_loss": True, "ema_teacher": False, "ckpt": "the initial weights", "rep_update": True, "update_frequency": 4,
                 "it_first_update": 4, "it_load_ema_teacher": -1, "max_updates": 2, "img_level": True, "normalized": True,
                 "remove_neg": False, "remove_only_teacher_neg": False, "tokens_used": "all", "compute_stats": False,
                 "global_teacher_resize_method": "bicubic", "global_teacher_resize_antialias": False, "loss_weight": 2.0,
                 "loss_weight_schedule": {"start": 0.0, "peak": 0.0, "end": 2.0, "warmup_epochs": 0, "cosine_epochs": 2}},
        "teacher": {"momentum_teacher": 0.9, "final_momentum_teacher": 1.0, "warmup_teacher_temp": 0.04, "teacher_temp": 0.07,
                    "warmup_teacher_temp_epochs": 2},
        "train": {"OFFICIAL_EPOCH_LENGTH": PER_EPOCH, "centering": "sinkhorn_knopp", "output_dir": folder, "batch_size_per_gpu": BATCH},
        "optim": {"lr": 0.005, "min_lr": 1e-5, "epochs": EPOCHS, "warmup_epochs": 2, "weight_decay": 0.04, "weight_decay_end": 0.4,
                  "clip_grad": 0.3, "layerwise_decay": 0.9, "patch_embed_lr_mult": 0.2, "dino_head_wd_multiplier": 1.0,
                  "freeze_last_layer_epochs": 1, "adamw_beta1": 0.9, "adamw_beta2": 0.999, "multi_tensor_optim": False,
                  "schedule_trunc_extra": 0.0},
        "compute_precision": {"sharding_strategy": "SHARD_GRAD_OP", "param_dtype": "fp32"},
        "distillation": {"enabled": False}, "multidistillation": {"enabled": False},
        "evaluation": {"eval_period_iterations": 0}, "checkpointing": {"period": 10**9},
    }
    usual = OmegaConf.load(paths.dinov3 / "dinov3/configs/ssl_default_config.yaml")
    return OmegaConf.merge(usual, ours)


def batch(run: str, step: int) -> dict:
    """What the official collate function makes of a batch."""
    crops = views(run, step % N_BATCHES, BATCH, [(2, SIZE), (LOCAL, 16), (2, LARGER)])
    chosen = masks(step, BATCH, 2, SIZE // PATCH, 0.5, (0.1, 0.5), exact=True).transpose(0, 1).flatten(0, 1)
    places = chosen.flatten().nonzero().flatten()
    weight = (1 / chosen.sum(-1).clamp(min=1.0)).unsqueeze(-1).expand_as(chosen)[chosen]
    return {
        "collated_global_crops": torch.cat(crops[:2]), "collated_local_crops": torch.cat(crops[2:2 + LOCAL]),
        "collated_gram_teacher_crops": torch.cat(crops[2 + LOCAL:]), "collated_masks": chosen, "mask_indices_list": places,
        "masks_weight": weight.double(), "upperbound": len(places) + 3, "n_masked_patches": torch.tensor([len(places)]),
    }


def dinov3(paths, run: str, folder: str):
    train, arch, models, vits = import_dinov3(paths)
    losses = []

    def backprop(model, loss):
        losses.append(loss.detach().clone())
        loss.backward()

    def given(model):
        # Makes the buffers of rotary positions and of the mask of biases.
        model.student.backbone.init_weights()
        fill(model.student, name_here)
        model.teacher.load_state_dict(model.student.state_dict())
        model.gram_teacher.backbone.load_state_dict(model.student.backbone.state_dict())
        model.gram_teacher_initialized = True

    build = lambda cfg, only_teacher=False: models.build_model(cfg.student, only_teacher, SIZE, "cpu")
    # `build_model` does not hand on the type of rotary angles, bf16 by default, which would hide other differences.
    vits.vit_golden = lambda **options: vits.DinoVisionTransformer(
        embed_dim=D, depth=DEPTH, num_heads=HEADS, ffn_ratio=2, pos_embed_rope_dtype="fp32", **options)
    replaced = [
        (arch, "build_model_from_cfg", build), (arch.SSLMetaArch, "init_weights", given), (arch.SSLMetaArch, "backprop_loss", backprop),
        (train, "build_multi_resolution_data_loader_from_cfg", lambda **_: [batch(run, step) for step in range(EPOCHS * PER_EPOCH)]),
    ]
    # Gloo has no average, and gathers no scalars: one rank needs neither.
    replaced += [(torch.distributed, "all_reduce", lambda *_, **__: None),
                 (torch.distributed, "all_gather_into_tensor", lambda to, value, **_: to.copy_(value.reshape(to.shape)))]
    with machine(replaced):
        model = arch.SSLMetaArch(config(paths, folder))
        train.do_train(model.cfg, model)
        rates = train.build_schedulers(model.cfg)[0].schedule[: len(losses)]
    out = {"loss": torch.stack(losses), "lr": torch.tensor(rates)}
    for name, network in (("student", model.student), ("teacher", model.teacher), ("gram_teacher", model.gram_teacher)):
        state = {key: value for key, value in network.state_dict().items() if name_here(key) is not None}
        out |= {f"{name}.{name_here(key)}": value.detach().clone() for key, value in state.items()}
    return out
