"""Images and views of a recipe with the usual tools: PIL and torchvision transforms in a DataLoader."""

import glob
import io
import os
import tarfile

import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def shard_samples(path):
    """Bytes and class of the samples of a shard."""
    parts = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            parts.setdefault(key, {})[extension] = tar.extractfile(member).read()
    for sample in parts.values():
        label = int(sample.pop("cls"))
        yield next(iter(sample.values())), label


def folder_samples(folder):
    """Bytes and class of the images of a folder with a subfolder for each class, which are numbered by their names."""
    classes = sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))
    for label, name in enumerate(classes):
        for path in sorted(glob.glob(os.path.join(folder, name, "*"))):
            with open(path, "rb") as file:
                yield file.read(), label


def samples(pattern):
    """Bytes and class of all samples of shards, which a pattern or a folder names, or of a folder of images."""
    shards = sorted(glob.glob(os.path.join(pattern, "*.tar") if os.path.isdir(pattern) else pattern))
    if os.path.isdir(pattern) and not shards:
        yield from folder_samples(pattern)
    for path in shards:
        yield from shard_samples(path)


class Shards(Dataset):
    """All labeled images of some shards or of a folder, held in memory as the bytes they are."""

    def __init__(self, pattern, transform):
        self.images, self.labels, self.transform = [], [], transform
        for image, label in samples(pattern):
            self.images.append(image)
            self.labels.append(label)
        if not self.images:
            raise SystemExit(f"no images in {pattern}")

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(Image.open(io.BytesIO(self.images[i])).convert("RGB"))


class Labeled(Shards):
    """Images of shards with their classes, as an ImageFolder gives them."""

    def __getitem__(self, i):
        return super().__getitem__(i), self.labels[i]


def blur(crop):
    """Pillow's blur, as in DINO and SwAV, or torchvision's where the recipe has a number of taps."""
    low, high = crop.get("blur_sigma", (0.1, 2.0))
    if crop.get("blur_taps"):
        return T.GaussianBlur(crop["blur_taps"], (low, high))
    sigma = lambda: low + (high - low) * torch.rand(1).item()
    return T.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(sigma())))


class MultiCrop:
    """The views of a recipe, one transform per view, grouped by size."""

    def __init__(self, crops):
        self.groups = {}
        for crop in crops:
            j = crop.get("jitter", {})
            strengths = [j.get(key, 0.0) for key in ("brightness", "contrast", "saturation", "hue")]
            transform = T.Compose([
                T.RandomResizedCrop(crop["size_px"], scale=tuple(crop["scale"]), interpolation=T.InterpolationMode.BICUBIC),
                T.RandomHorizontalFlip(crop.get("flip_p", 0.0)),
                T.RandomApply([T.ColorJitter(*strengths)], p=j.get("p", 0.0)),
                T.RandomGrayscale(crop.get("gray_p", 0.0)),
                T.RandomApply([blur(crop)], p=crop.get("blur_p", 0.0)),
                T.RandomSolarize(128, crop.get("solarize_p", 0.0)),
                T.ToTensor(),
                T.Normalize(MEAN, STD),
            ])
            self.groups.setdefault(crop["size_px"], []).extend([transform] * crop["count"])

    def __call__(self, image):
        return [torch.stack([view(image) for view in views]) for views in self.groups.values()]


def batches(data, batch, workers):
    while True:
        yield from DataLoader(data, batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=False)
