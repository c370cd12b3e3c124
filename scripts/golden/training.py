"""Makes tests/golden/training/*.safetensors: what PyTorch computes of small networks, losses and AdamW.

Needs torch, timm and safetensors. Run at the root of the repository:

    python scripts/golden/training.py

Everything is computed in f64 from numbers that are exact in f32, and stored in f32. The transformer's blocks are timm's,
products, norms and AdamW PyTorch's; losses follow the papers. Whole runs of official code are made by scripts/golden/official.
"""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

OUT = Path("tests/golden/training")
IMAGE_PX, PATCH_PX, WIDTH = 16, 4, 12
HIDDEN, BOTTLENECK, PROTOTYPES = 10, 6, 16
MEAN = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64).view(3, 1, 1)


def normal(generator: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
    """Numbers that are exact in f32."""
    return (torch.randn(*shape, generator=generator) * std).float().double()


def pixels(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Noise around a color of each image's own, `[.., 3, S, S]`."""
    color = torch.randint(0, 256, (*shape[:-2], 1, 1), generator=generator)
    noise = torch.randint(-90, 91, shape, generator=generator)
    return (color + noise).clamp(0, 255).to(torch.uint8)


def normalized(images: torch.Tensor) -> torch.Tensor:
    return (images.double() / 255 - MEAN) / STD


class Backbone(torch.nn.Module):
    """timm's blocks behind DINO's position embedding, whose offset is 0.1 in DINO's code and 0 in the paper."""

    def __init__(self, layer_scale: float | None, pos_offset: float) -> None:
        super().__init__()
        self.vit = VisionTransformer(
            img_size=IMAGE_PX, patch_size=PATCH_PX, embed_dim=WIDTH, depth=2, num_heads=2, mlp_ratio=2.0,
            num_classes=0, init_values=layer_scale,
        ).double()
        self.pos_offset = pos_offset

    def positions(self, n: int) -> torch.Tensor:
        native = IMAGE_PX // PATCH_PX
        table = self.vit.pos_embed
        if n == native:
            return table
        grid = table[:, 1:].reshape(1, native, native, WIDTH).permute(0, 3, 1, 2)
        if self.pos_offset:
            grid = F.interpolate(grid, scale_factor=((n + self.pos_offset) / native,) * 2, mode="bicubic")
        else:
            grid = F.interpolate(grid, size=(n, n), mode="bicubic")
        assert grid.shape[-2:] == (n, n)
        return torch.cat([table[:, :1], grid.permute(0, 2, 3, 1).reshape(1, n * n, WIDTH)], 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """All tokens, `[B, 1 + N, D]`."""
        patches = self.vit.patch_embed.proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.vit.cls_token.expand(len(images), -1, -1), patches], 1)
        x = x + self.positions(images.shape[-1] // PATCH_PX)
        for block in self.vit.blocks:
            x = block(x)
        return self.vit.norm(x)


class Head(torch.nn.Module):
    def __init__(self, trains_gain: bool) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.mlp = torch.nn.Sequential(
            linear(WIDTH, HIDDEN), torch.nn.GELU(), linear(HIDDEN, HIDDEN), torch.nn.GELU(),
            linear(HIDDEN, BOTTLENECK),
        )
        last = linear(BOTTLENECK, PROTOTYPES, bias=False)
        self.last_layer = torch.nn.utils.weight_norm(last)
        self.last_layer.weight_g.requires_grad = trains_gain
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


def name_here(name: str) -> str:
    return name.removeprefix("backbone.").removeprefix("vit.")


def trained(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name_here(name): p for name, p in module.named_parameters() if p.requires_grad}


def spread(module: torch.nn.Module, generator: torch.Generator, std: float) -> None:
    """Weights of a size at which every branch matters."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") or "weight_g" in name else 0.0
            fixed = "weight_g" in name and not p.requires_grad
            p.copy_(torch.ones_like(p) if fixed else (around + normal(generator, *p.shape, std=std)).float().double())


def prefixed(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def backbones() -> dict[str, torch.Tensor]:
    made = {}
    for kind, layer_scale, pos_offset in [("plain", None, 0.0), ("full", 0.5, 0.1)]:
        generator = torch.Generator().manual_seed(1)
        backbone = Backbone(layer_scale, pos_offset)
        spread(backbone, generator, 0.3)
        total = 0.0
        for size in (16, 8, 24):
            images = pixels(generator, 2, 3, size, size)
            tokens = backbone(normalized(images))
            weights = normal(generator, *tokens.shape)
            total = total + (tokens * weights).sum()
            made |= {f"{kind}.{size}.images": images, f"{kind}.{size}.tokens": tokens,
                     f"{kind}.{size}.weights": weights}
        total.backward()
        params = trained(backbone)
        made |= prefixed(f"{kind}.param", params)
        made |= prefixed(f"{kind}.grad", {name: p.grad for name, p in params.items()})
    return made


def head() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    module = Head(trains_gain=True)
    spread(module, generator, 0.4)
    x = normal(generator, 5, WIDTH).requires_grad_()
    logits = module(x)
    weights = normal(generator, *logits.shape)
    (logits * weights).sum().backward()
    params = trained(module)
    made = {"x": x, "logits": logits, "weights": weights, "grad_x": x.grad}
    return made | prefixed("param", params) | prefixed("grad", {name: p.grad for name, p in params.items()})


def cross_entropy(student: list[torch.Tensor], targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """DINO's loss: every view of the student against every other view of the teacher."""
    views = [logits[:, v] for logits in student for v in range(logits.shape[1])]
    total, n = 0.0, 0
    for t in range(targets.shape[1]):
        for s, logits in enumerate(views):
            if s == t:
                continue
            total = total - (targets[:, t] * F.log_softmax(logits / temperature, -1)).sum(-1).mean()
            n += 1
    return total / n


def sinkhorn(teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Three iterations over all views of all images, `[B, V, K]`."""
    b, v, k = teacher.shape
    q = (teacher.reshape(b * v, k) / temperature).exp().T
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / k
        q = q / q.sum(0, keepdim=True) / (b * v)
    return (q * b * v).T.reshape(b, v, k)


def koleo(x: torch.Tensor) -> torch.Tensor:
    """Of one view of a batch, `[B, D]`."""
    x = F.normalize(x, eps=1e-8, dim=-1)
    with torch.no_grad():
        nearest = (x @ x.T).fill_diagonal_(-1).argmax(1)
    return -torch.log(F.pairwise_distance(x, x[nearest], 2, 1e-8) + 1e-8).mean()


def losses() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    student = [normal(generator, 6, 2, 11).requires_grad_(), normal(generator, 6, 3, 11).requires_grad_()]
    teacher, center = normal(generator, 6, 2, 11), normal(generator, 11, std=0.3)
    targets = ((teacher - center) / 0.04).softmax(-1)
    loss = cross_entropy(student, targets, 0.1)
    loss.backward()
    embeddings = normal(generator, 9, 7).requires_grad_()
    spread_out = koleo(embeddings)
    spread_out.backward()
    return {
        "student_0": student[0], "student_1": student[1], "teacher": teacher, "center": center,
        "loss": loss, "grad_0": student[0].grad, "grad_1": student[1].grad,
        "mean": teacher.mean((0, 1)), "sinkhorn": sinkhorn(teacher, 0.07),
        "embeddings": embeddings, "koleo": spread_out, "koleo_grad": embeddings.grad,
    }


def groups_of(params: dict[str, torch.nn.Parameter], lr: float, weight_decay: float) -> list[dict]:
    decayed = [p for name, p in params.items() if p.ndim > 1 and not name.endswith(".bias")]
    others = [p for name, p in params.items() if not (p.ndim > 1 and not name.endswith(".bias"))]
    return [{"params": decayed, "lr": lr, "weight_decay": weight_decay},
            {"params": others, "lr": lr, "weight_decay": 0.0}]


def adamw() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    module = Head(trains_gain=False).mlp
    spread(module, generator, 0.4)
    params = trained(module)
    made = prefixed("param", {name: p.detach().clone() for name, p in params.items()})
    optimizer = torch.optim.AdamW(groups_of(params, 0.0, 0.0), betas=(0.9, 0.95), eps=1e-8)
    for step, (lr, weight_decay) in enumerate([(1e-2, 0.04), (3e-2, 0.1), (2e-2, 0.4)]):
        for group, decay in zip(optimizer.param_groups, (weight_decay, 0.0)):
            group["lr"], group["weight_decay"] = lr, decay
        for name, p in params.items():
            p.grad = normal(generator, *p.shape, std=10.0 ** (-2 * step))
            made[f"grad_{step}.{name}"] = p.grad.clone()
        optimizer.step()
        made |= prefixed(f"after_{step}", {name: p.detach().clone() for name, p in params.items()})
    return made


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    files = {"vit": backbones(), "head": head(), "losses": losses(), "adamw": adamw()}
    for name, tensors in files.items():
        stored = {key: value.detach().contiguous() for key, value in tensors.items()}
        stored = {key: value if value.dtype == torch.uint8 else value.float() for key, value in stored.items()}
        save_file(stored, OUT / f"{name}.safetensors")
        (OUT / f"{name}.safetensors").chmod(0o644)
    (OUT / "versions.txt").write_text(f"torch {torch.__version__}, timm {timm.__version__}\n")


if __name__ == "__main__":
    main()
