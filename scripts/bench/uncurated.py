"""Makes an uncurated set of images: a long tail of classes, near-duplicates, and images of another kind.

Input: shards of CIFAR-10 with .png or .jpg and .cls members, and shards of photographs. Class c of ten keeps a share of 100^(-c/9)
of its images, so that the largest has a hundred times as many as the smallest. Then near-duplicates are added, 30 % of the result, of
images drawn at random: shifted by a pixel, with brightness and contrast changed by up to 5 %, and saved as JPEG. Photographs are
scaled to 32 px. Writes OUT/raw.tar, and OUT/oracle.tar: as many images of each class, as far as there are any, without
near-duplicates, chosen by their labels.

    python uncurated.py --cifar 'cifar/train-*.tar' --photos 'photos/*.tar' --oracle-count 1500 --out sets/
"""

import argparse
import glob
import io
import os
import random
import tarfile

from PIL import Image, ImageEnhance


def samples(pattern):
    """Yields image and class of each sample of the shards."""
    for path in sorted(glob.glob(pattern)):
        with tarfile.open(path) as tar:
            parts = {}
            for member in tar:
                key, _, extension = member.name.partition(".")
                parts.setdefault(key, {})[extension] = tar.extractfile(member).read()
            for part in parts.values():
                image = next((part[e] for e in ("png", "jpg", "jpeg") if e in part), None)
                if image is not None:
                    yield Image.open(io.BytesIO(image)).convert("RGB"), part.get("cls", b"-1").decode().strip()


def encoded(image, extension):
    out = io.BytesIO()
    image.save(out, "PNG" if extension == "png" else "JPEG", quality=85)
    return out.getvalue()


def near_duplicate(image, rng):
    """Returns a slightly changed copy as JPEG."""
    x, y = rng.choice([-1, 0, 1]), rng.choice([-1, 0, 1])
    copy = image.transform(image.size, Image.AFFINE, (1, 0, x, 0, 1, y))
    copy = ImageEnhance.Brightness(copy).enhance(rng.uniform(0.95, 1.05))
    return ImageEnhance.Contrast(copy).enhance(rng.uniform(0.95, 1.05))


def write(path, rows):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (image, extension, label, origin) in enumerate(rows):
            members = [(extension, encoded(image, extension)), ("cls", label.encode()), ("origin.txt", origin.encode())]
            for name, data in members:
                info = tarfile.TarInfo(f"{number:08}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--photos", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--oracle-count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    by_class = {}
    for number, (image, label) in enumerate(samples(args.cifar)):
        by_class.setdefault(label, []).append((image, "png", label, f"cifar {number}"))
    kept = {}
    for rank, label in enumerate(sorted(by_class, key=int)):
        share = 100 ** (-rank / max(1, len(by_class) - 1))
        kept[label] = rng.sample(by_class[label], max(1, round(len(by_class[label]) * share)))
    photos = [(image.resize((32, 32), Image.BICUBIC), "png", "-1", f"photo {number}")
              for number, (image, _) in enumerate(samples(args.photos))]
    distinct = [row for rows in kept.values() for row in rows] + photos
    copies = []
    for _ in range(round(len(distinct) * 3 / 7)):
        image, _, label, origin = rng.choice(distinct)
        copies.append((near_duplicate(image, rng), "jpg", label, f"{origin} again"))
    raw = distinct + copies
    rng.shuffle(raw)
    os.makedirs(args.out, exist_ok=True)
    write(os.path.join(args.out, "raw.tar"), raw)
    # Evenly over the classes: the smaller ones give all they have, the others share the rest.
    left, oracle = args.oracle_count, []
    for position, label in enumerate(sorted(kept, key=lambda label: len(kept[label]))):
        share = min(len(kept[label]), left // (len(kept) - position))
        oracle += rng.sample(kept[label], share)
        left -= share
    rng.shuffle(oracle)
    write(os.path.join(args.out, "oracle.tar"), oracle)
    sizes = {label: len(rows) for label, rows in kept.items()}
    print(f"raw: {len(raw)} images, {len(copies)} near-duplicates, {len(photos)} photographs, classes {sizes}")
    print(f"oracle: {len(oracle)} images")


if __name__ == "__main__":
    main()
