"""Makes goldens of convolutional networks and of what trains them: what PyTorch and torchvision compute.

Needs torch, torchvision and safetensors. Run at the root of the repository:

    python scripts/golden/convolution.py

Everything is computed in f64 and stored in f32. Weights of whole networks are a function of their names, which the tests
compute as well, so that only inputs and outputs are stored.
"""

from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file
from torchvision.models.regnet import BlockParams, RegNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

OUT = Path("tests/golden/training")
MEAN = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64).view(3, 1, 1)


def normal(generator: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
    """Numbers that are exact in f32."""
    return (torch.randn(*shape, generator=generator) * std).float().double()


def uniform(name: str, n: int) -> numpy.ndarray:
    """n numbers of 0..1 that depend on name and place alone: SplitMix64 from the FNV-1a hash of the name."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) % 2**64
    with numpy.errstate(over="ignore"):
        z = numpy.uint64(seed) + numpy.arange(1, n + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    return (z >> numpy.uint64(40)).astype(numpy.float64) / 2**24


def fill(network: torch.nn.Module) -> None:
    """Weights by name: matrices and kernels in ±√(6 / inputs), gains and variances in 0.5..1.5, the rest in ±0.1."""
    for name, tensor in network.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        numbers = torch.from_numpy(uniform(name, tensor.numel())).view(tensor.shape)
        if tensor.dim() > 1:
            bound = (6.0 / tensor[0].numel()) ** 0.5
            numbers = (numbers * 2 - 1) * bound
        elif name.endswith("running_var") or name.endswith("weight"):
            numbers = numbers + 0.5
        else:
            numbers = numbers * 0.2 - 0.1
        with torch.no_grad():
            tensor.copy_(numbers.float().double())


def pixels(name: str, size: int) -> torch.Tensor:
    """Four images: noise around a color of each image's own."""
    color = uniform(f"{name}.colors", 12).reshape(4, 3, 1, 1) * 160
    noise = uniform(f"{name}.noise", 12 * size * size).reshape(4, 3, size, size) * 95
    return torch.from_numpy((color + noise).astype(numpy.uint8))


def small_stem(network: ResNet) -> ResNet:
    network.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    network.maxpool = torch.nn.Identity()
    return network


def headless(network: torch.nn.Module) -> torch.nn.Module:
    network.fc = torch.nn.Identity()
    return network.double()


def network_makers() -> dict[str, tuple[int, Callable[[], torch.nn.Module]]]:
    models = torchvision.models
    tiny = dict(depth=4, w_0=16, w_a=9.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return {
        "tiny": (32, lambda: RegNet(BlockParams.from_init_params(**tiny))),
        "resnet18_small": (32, lambda: small_stem(models.resnet18())),
        "resnet18": (64, models.resnet18),
        "resnet34": (64, models.resnet34),
        "resnet50": (96, models.resnet50),
        "resnet14": (64, lambda: ResNet(Bottleneck, [1, 1, 1, 1])),
        "resnet10": (64, lambda: ResNet(BasicBlock, [1, 1, 1, 1])),
        "regnet_y_400mf": (64, models.regnet_y_400mf),
        "regnet_y_800mf": (64, models.regnet_y_800mf),
    }


def networks() -> dict[str, torch.Tensor]:
    """Features in training, with new running statistics, and in evaluation; gradients where the network is small."""
    out = {}
    generator = torch.Generator().manual_seed(0)
    for name, (size, make) in network_makers().items():
        network = headless(make())
        fill(network)
        images = pixels(name, size)
        x = (images.double() / 255 - MEAN) / STD
        network.eval()
        with torch.no_grad():
            out[f"{name}.evaluated"] = network(x)
        network.train()
        features = network(x)
        weights = normal(generator, *features.shape)
        out[f"{name}.trained"] = features
        out[f"{name}.weights"] = weights
        if name == "tiny":
            (features * weights).sum().backward()
            for param, tensor in network.named_parameters():
                out[f"{name}.grad.{param}"] = tensor.grad
            for buffer, tensor in network.named_buffers():
                if not buffer.endswith("num_batches_tracked"):
                    out[f"{name}.after.{buffer}"] = tensor
    return out


def convolutions() -> dict[str, torch.Tensor]:
    """Convolutions and poolings, with gradients. Names say images, grid, channels, groups, kernel, stride, padding."""
    out = {}
    generator = torch.Generator().manual_seed(1)
    cases = [
        (2, 5, 7, 6, 10, 1, 3, 3, 1, 1),
        (2, 5, 7, 6, 10, 2, 3, 3, 1, 1),
        (3, 7, 6, 4, 8, 1, 3, 3, 2, 1),
        (2, 9, 5, 6, 6, 6, 3, 3, 2, 1),
        (2, 1, 1, 5, 3, 1, 3, 3, 1, 1),
        (2, 1, 1, 5, 3, 1, 1, 1, 2, 0),
        (2, 6, 5, 5, 9, 1, 1, 1, 1, 0),
        (1, 13, 11, 3, 4, 1, 7, 5, 2, 3),
    ]
    for case in cases:
        b, h, w, c, o, groups, kh, kw, stride, padding = case
        name = "_".join(map(str, case))
        x = normal(generator, b, c, h, w).requires_grad_()
        weight = normal(generator, o, c // groups, kh, kw).requires_grad_()
        y = F.conv2d(x, weight, None, stride, padding, 1, groups)
        g = normal(generator, *y.shape)
        gx, gw = torch.autograd.grad((y * g).sum(), [x, weight])
        rows = lambda t: t.permute(0, 2, 3, 1).flatten(1, 2)
        out |= {f"conv.{name}.{key}": value for key, value in
                dict(x=rows(x), weight=weight, y=rows(y), g=rows(g), gx=rows(gx), gw=gw).items()}
    for h, w, side, stride, padding in [(7, 6, 3, 2, 1), (8, 8, 2, 2, 0), (1, 1, 3, 2, 1)]:
        x = normal(generator, 2, 5, h, w).requires_grad_()
        y = F.max_pool2d(x, side, stride, padding)
        g = normal(generator, *y.shape)
        (gx,) = torch.autograd.grad((y * g).sum(), [x])
        rows = lambda t: t.permute(0, 2, 3, 1).flatten(1, 2)
        name = f"{h}_{w}_{side}_{stride}_{padding}"
        out |= {f"pool.{name}.{key}": value for key, value in dict(x=rows(x), y=rows(y), g=rows(g), gx=rows(gx)).items()}
    return out


def batch_norms() -> dict[str, torch.Tensor]:
    """Batch normalization in training, three times in a row; the third time one channel is constant."""
    out = {}
    generator = torch.Generator().manual_seed(2)
    norm = torch.nn.BatchNorm2d(6).double()
    with torch.no_grad():
        for param in ("weight", "bias"):
            getattr(norm, param).copy_(1 + normal(generator, 6, std=0.3))
        norm.running_mean.copy_(normal(generator, 6, std=0.1))
    out |= {f"before.{name}": value.clone() for name, value in norm.state_dict().items() if value.dim()}
    for step, n in enumerate([8, 4, 6]):
        x = normal(generator, n, 6, 3, 5) * torch.linspace(0.5, 2, 6).view(6, 1, 1) + 0.7
        if step == 2:
            x[:, 4] = 1.25
        x = x.float().double().requires_grad_()
        y = norm(x)
        g = normal(generator, *y.shape)
        gx, gw, gb = torch.autograd.grad((y * g).sum(), [x, norm.weight, norm.bias])
        rows = lambda t: t.permute(0, 2, 3, 1).flatten(1, 2)
        out |= {f"{step}.{key}": value for key, value in
                dict(x=rows(x), y=rows(y), g=rows(g), gx=rows(gx), gw=gw, gb=gb).items()}
        out |= {f"{step}.{name}": getattr(norm, name).clone() for name in ("running_mean", "running_var")}
    return out


def by_layer(params: list[torch.Tensor], weight_decay: float, trust: float, everything: bool) -> None:
    """LARS as VISSL and MoCo v3 have it, for matrices, or apex's LARC without clipping, for every parameter."""
    for param in params:
        if not everything and param.dim() <= 1:
            continue
        lengths = param.norm(), param.grad.norm()
        direction = param.grad + weight_decay * param
        if not everything:
            rate = trust * lengths[0] / direction.norm() if min(lengths[0], direction.norm()) > 0 else 1
            param.grad = rate * direction
        elif min(lengths) > 0:
            param.grad = trust * lengths[0] / (lengths[1] + weight_decay * lengths[0] + 1e-8) * direction


def optimizers() -> dict[str, torch.Tensor]:
    """Three steps of each, on the projection of two layers that the test has."""
    out = {}
    shapes = {"linear0.weight": (10, 12), "linear0.bias": (10,), "linear1.weight": (6, 10), "linear1.bias": (6,)}
    for name in ("sgd", "nesterov", "lars", "larc"):
        generator = torch.Generator().manual_seed(3)
        params = {key: normal(generator, *shape, std=0.3).requires_grad_() for key, shape in shapes.items()}
        if name == "larc":
            # A length of zero: neither rate nor decay.
            params["linear1.bias"] = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        out |= {f"{name}.param.mlp.{key}": value.detach().clone() for key, value in params.items()}
        matrices = [value for value in params.values() if value.dim() > 1]
        vectors = [value for value in params.values() if value.dim() == 1]
        optimizer = torch.optim.SGD(
            [{"params": matrices}, {"params": vectors}], lr=1.0, momentum=0.9, nesterov=name == "nesterov"
        )
        for step, (lr, weight_decay) in enumerate([(1e-1, 0.04), (3e-1, 0.1), (2e-1, 0.4)]):
            for key, value in params.items():
                value.grad = normal(generator, *value.shape, std=0.1**step)
                out[f"{name}.grad_{step}.mlp.{key}"] = value.grad.clone()
            with torch.no_grad():
                if name in ("lars", "larc"):
                    by_layer(list(params.values()), weight_decay, 0.02, name == "larc")
                else:
                    optimizer.param_groups[0]["weight_decay"] = weight_decay
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            out |= {f"{name}.after_{step}.mlp.{key}": value.detach().clone() for key, value in params.items()}
    return out


def objectives() -> dict[str, torch.Tensor]:
    """NT-Xent, LeJEPA's regularizer as its paper's listing has it, and all of LeJEPA's and SwAV's losses (this with a queue and without),
    with gradients at the embeddings or scores."""
    generator = torch.Generator().manual_seed(4)
    out = {}
    z = normal(generator, 8, 2, 6).requires_grad_()
    flat = F.normalize(z.flatten(0, 1), dim=-1)
    scores = flat @ flat.T / 0.2
    scores = scores.masked_fill(torch.eye(16, dtype=torch.bool), -torch.inf)
    partners = torch.arange(16) ^ 1
    loss = F.cross_entropy(scores, partners)
    (grad,) = torch.autograd.grad(loss, [z])
    out |= {"contrast.z": z, "contrast.loss": loss.view(1), "contrast.grad": grad}

    z = (normal(generator, 12, 3, 6) * 1.3 + 0.2).float().double().requires_grad_()
    directions = normal(generator, 6, 9)
    directions = (directions / directions.norm(dim=0)).float().double()
    t = torch.linspace(0, 3, 17, dtype=torch.float64)
    dt = 3 / 16
    weights = torch.full((17,), 2 * dt, dtype=torch.float64)
    weights[[0, -1]] = dt
    phi = torch.exp(-t.square() / 2)
    weights = weights * phi
    angles = (z.transpose(0, 1) @ directions).unsqueeze(-1) * t
    error = (angles.cos().mean(-3) - phi).square() + angles.sin().mean(-3).square()
    loss = ((error @ weights) * z.shape[0]).mean()
    (grad,) = torch.autograd.grad(loss, [z])
    out |= {"sigreg.z": z, "sigreg.directions": directions.T, "sigreg.loss": loss.view(1), "sigreg.grad": grad}
    for name, n_central in [("global", 2), ("all", 3)]:
        agreement = (z - z[:, :n_central].mean(1, keepdim=True)).square().mean()
        (grad,) = torch.autograd.grad(agreement, [z])
        out |= {f"agreement.{name}.loss": agreement.view(1), f"agreement.{name}.grad": grad}
    return out | swapped(generator)


def swapped(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """SwAV with four views, of which two are assigned among those of the batch and of a queue."""
    embeddings = F.normalize(normal(generator, 6, 4, 5), dim=-1).float().double()
    queue = F.normalize(normal(generator, 8, 2, 5), dim=-1).float().double()
    prototypes = F.normalize(normal(generator, 7, 5), dim=-1).float().double()
    scores = (embeddings @ prototypes.T).float().double().requires_grad_()
    out = {"swav.scores": scores, "swav.queue": queue, "swav.prototypes": prototypes}
    for name, earlier in [("alone", queue[:0]), ("queued", queue)]:
        loss = 0
        for a in range(2):
            logits = torch.cat([scores[:, a].detach(), earlier[:, a] @ prototypes.T])
            assigned = torch.exp((logits - logits.max()) / 0.05)
            for _ in range(3):
                assigned = assigned / assigned.sum(0, keepdim=True)
                assigned = assigned / assigned.sum(1, keepdim=True)
            others = [v for v in range(4) if v != a]
            terms = [-(assigned[:6] * F.log_softmax(scores[:, v] / 0.1, -1)).sum(-1).mean() for v in others]
            loss = loss + sum(terms) / len(others) / 2
        (grad,) = torch.autograd.grad(loss, [scores])
        out |= {f"swav.{name}.loss": loss.view(1), f"swav.{name}.grad": grad}
    return out


def main() -> None:
    made = {
        "convolutions": convolutions(),
        "batch_norm": batch_norms(),
        "convnets": networks(),
        "descent": optimizers(),
        "objectives": objectives(),
    }
    for name, tensors in made.items():
        stored = {key: value.detach() for key, value in tensors.items()}
        stored = {key: value if value.dtype == torch.uint8 else value.float() for key, value in stored.items()}
        save_file({key: value.contiguous() for key, value in stored.items()}, OUT / f"{name}.safetensors")


if __name__ == "__main__":
    main()
