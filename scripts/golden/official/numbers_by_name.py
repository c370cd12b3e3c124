"""Weights, views and directions as functions of their names: what tests compute again, so that no file holds them."""

import math

import numpy as np
import torch
import torch.nn as nn

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# Batches that a run goes through again and again.
N_BATCHES = 3


def uniform(name: str, n: int) -> np.ndarray:
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float64) / 2**24


def fill(network: nn.Module, name_here) -> None:
    """Weights by their names here, as scripts/golden/convolution.py: matrices in ±√(6 / inputs), gains and variances in
    0.5..1.5, the rest in ±0.1. The gain of a weight-normalized layer starts at one, as it does officially."""
    for name, tensor in network.state_dict().items():
        name = name_here(name)
        if name is None or name.endswith("weight_g"):
            continue
        numbers = torch.from_numpy(uniform(name, tensor.numel())).view(tensor.shape)
        if tensor.dim() > 1:
            numbers = (numbers * 2 - 1) * (6.0 / tensor[0].numel()) ** 0.5
        elif name.endswith("running_var") or name.endswith("weight"):
            numbers = numbers + 0.5
        else:
            numbers = numbers * 0.2 - 0.1
        with torch.no_grad():
            tensor.copy_(numbers.float())


def sin_cos(side: int, width: int, n_before: int) -> torch.Tensor:
    """The table of positions of networks/src/init.rs, `[1, n_before + side², width]`, in f32."""
    frequencies = 1e4 ** (-np.arange(width // 4) / (width // 4))
    rows, columns = np.divmod(np.arange(side * side), side)
    angles = [place[:, None] * frequencies for place in (rows, columns)]
    table = np.concatenate([function(angle) for angle in angles for function in (np.sin, np.cos)], 1)
    table = np.concatenate([np.zeros((n_before, width)), table])
    return torch.from_numpy(table.astype(np.float32)).to(torch.get_default_dtype())[None]


def use_our_positions(table: torch.Tensor, n_before: int) -> None:
    """Replaces the official sines and cosines, whose first half is that of columns, by those here, which begin with rows."""
    width, side = table.shape[2], int((table.shape[1] - n_before) ** 0.5)
    ours = sin_cos(side, width, n_before)
    columns_first = torch.cat([ours[..., width // 2:], ours[..., :width // 2]], -1)
    assert torch.allclose(table.detach(), columns_first, atol=1e-6)
    table.data.copy_(ours)


def pixels(run: str, batch: int, group: int, n_images: int, n_views: int, size: int) -> torch.Tensor:
    """The views of one size of a batch, `[B, V, 3, S, S]` bytes: noise around a color of each image's own."""
    color = uniform(f"{run}.{batch}.colors", n_images * 3).reshape(n_images, 1, 3, 1, 1) * 160
    n = n_images * n_views * 3 * size * size
    noise = uniform(f"{run}.{batch}.{group}.noise", n).reshape(n_images, n_views, 3, size, size) * 95
    return torch.from_numpy((color + noise).astype(np.uint8))


def views(run: str, batch: int, n_images: int, groups: list[tuple[int, int]]) -> list[torch.Tensor]:
    """By view, `[B, 3, S, S]`, normalized."""
    mean, std = (torch.tensor(values, dtype=torch.get_default_dtype()).view(3, 1, 1) for values in (MEAN, STD))
    out = []
    for group, (n_views, size) in enumerate(groups):
        images = pixels(run, batch, group, n_images, n_views, size).to(torch.get_default_dtype())
        out += [(images[:, v] / 255 - mean) / std for v in range(n_views)]
    return out


def chacha8(words: list[int], n: int) -> np.ndarray:
    """The first n u32 of rand_chacha's ChaCha8Rng seeded with four u64, as augment::seed::ViewRng::from_words."""
    key = [part for word in words for part in (word & 0xFFFFFFFF, word >> 32)]
    blocks = -(-n // 16)
    with np.errstate(over="ignore"):
        init = np.zeros((16, blocks), np.uint32)
        init[:4] = np.array([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], np.uint32)[:, None]
        init[4:12] = np.array(key, np.uint32)[:, None]
        init[12] = np.arange(blocks, dtype=np.uint32)
        x = init.copy()

        def rotate(v, k):
            return (v << np.uint32(k)) | (v >> np.uint32(32 - k))

        def quarter(a, b, c, d):
            x[a] += x[b]; x[d] = rotate(x[d] ^ x[a], 16)
            x[c] += x[d]; x[b] = rotate(x[b] ^ x[c], 12)
            x[a] += x[b]; x[d] = rotate(x[d] ^ x[a], 8)
            x[c] += x[d]; x[b] = rotate(x[b] ^ x[c], 7)

        for _ in range(4):
            quarter(0, 4, 8, 12); quarter(1, 5, 9, 13); quarter(2, 6, 10, 14); quarter(3, 7, 11, 15)
            quarter(0, 5, 10, 15); quarter(1, 6, 11, 12); quarter(2, 7, 8, 13); quarter(3, 4, 9, 14)
        x += init
    return x.T.reshape(-1)[:n]


def directions(seed: int, step: int, m: int, d: int) -> torch.Tensor:
    """Normal numbers behind trainer::method::loss::sigreg::draw_directions, before their length is made one: `[D, M]`."""
    out = np.zeros((m, d))
    for number in range(m):
        u = (chacha8([seed, step, number, 0x7369677265670000], 2 * d) >> np.uint32(8)).astype(np.float64) / 2**24
        out[number] = np.sqrt(-2 * np.log(1 - u[0::2])) * np.cos(2 * math.pi * u[1::2])
    return torch.from_numpy(out.astype(np.float32).T.astype(np.float64).copy()).to(torch.get_default_dtype())


def check_chacha() -> None:
    """The stream that augment/src/seed.rs pins."""
    drawn = [(int(word) << 20) >> 32 for word in chacha8([1, 2 << 32, 3, (5 << 32) | 3], 3)]
    assert drawn == [297_752, 88_069, 903_769], drawn
