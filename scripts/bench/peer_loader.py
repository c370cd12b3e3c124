"""The other side of `ocelli bench loader`: webdataset and torchvision, one process a core.

DINOv2's multi-crop (2 views of 224 px and 8 of 96, all color operations) or one random-resized crop, on
the shards that are given, over and over. Needs webdataset, torch, torchvision and pillow<13.

    python scripts/bench/peer_loader.py 'photos-*.tar' --recipe dinov2 --workers 2 --seconds 10
"""

import argparse
import glob
import time

import torch
import webdataset as wds
from torchvision import transforms as T

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class MultiCrop:
    """DINOv2's views (Oquab et al. 2023, table 16), with the paper's probabilities of blur."""

    def __init__(self) -> None:
        jitter = T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8)
        color = [jitter, T.RandomGrayscale(0.2)]
        normalize = [T.ToTensor(), T.Normalize(MEAN, STD)]

        def view(size: int, scale: tuple[float, float], blur: float, solarize: float) -> T.Compose:
            crop = T.RandomResizedCrop(size, scale, interpolation=T.InterpolationMode.BICUBIC)
            blurred = T.RandomApply([T.GaussianBlur(9, (0.1, 2.0))], blur)
            last = [T.RandomSolarize(128, solarize)] if solarize else []
            return T.Compose([crop, T.RandomHorizontalFlip(), *color, blurred, *last, *normalize])

        self.views = [view(224, (0.32, 1.0), 1.0, 0.0), view(224, (0.32, 1.0), 0.1, 0.2)]
        self.views += [view(96, (0.05, 0.32), 0.5, 0.0)] * 8

    def __call__(self, image):
        views = [view(image) for view in self.views]
        return torch.stack(views[:2]), torch.stack(views[2:])


def single():
    crop = T.RandomResizedCrop(224, interpolation=T.InterpolationMode.BICUBIC)
    return T.Compose([crop, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards")
    parser.add_argument("--recipe", choices=["dinov2", "single"], default="dinov2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shards = sorted(glob.glob(args.shards))
    transform = MultiCrop() if args.recipe == "dinov2" else single()
    data = wds.WebDataset(shards, resampled=True, nodesplitter=wds.split_by_node)
    data = data.shuffle(1000, initial=100).decode("pil").to_tuple("jpg").map_tuple(transform)
    loader = wds.WebLoader(data.batched(64), batch_size=None, num_workers=args.workers)
    start, n, warm = time.time(), 0, False
    for _ in loader:
        elapsed = time.time() - start
        if not warm:
            # The workers start and fill their shuffle buffers first.
            if elapsed >= args.seconds / 2:
                start, warm = time.time(), True
            continue
        n += 64
        if elapsed >= args.seconds:
            break
    seconds = time.time() - start
    print(f"{args.recipe}, {args.workers} workers, {seconds:.1f} s: {n / seconds:.1f} images/s")


if __name__ == "__main__":
    main()
