"""DALI on the CPU, beside `ocelli bench loader`: the same crops and colors, as DALI does them.

DINOv2's multi-crop (2 views of 224 px and 8 of 96) or one random-resized crop, on the shards that are given,
over and over, as normalized f32 batches of 64. Needs nvidia-dali-cuda120; no GPU.

    python scripts/bench/peer_dali.py 'photos-*.tar' --recipe dinov2 --threads 2 --seconds 10
"""

import argparse
import glob
import time

from nvidia.dali import fn, pipeline_def, types

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def normalize(image):
    return fn.crop_mirror_normalize(
        image, mirror=fn.random.coin_flip(), mean=MEAN, std=STD, dtype=types.FLOAT, output_layout="CHW"
    )


def crop(image, size, scale):
    return fn.random_resized_crop(image, size=[size, size], random_area=scale, interp_type=types.INTERP_CUBIC)


def sometimes(probability, changed, image):
    on = fn.cast(fn.random.coin_flip(probability=probability), dtype=types.UINT8)
    return changed * on + image * (1 - on)


def view(image, size, scale, blur, solarize):
    image = crop(image, size, scale)
    amount = lambda strength: fn.random.uniform(range=[1 - strength, 1 + strength])
    jittered = fn.color_twist(
        image,
        brightness=amount(0.4),
        contrast=amount(0.4),
        saturation=amount(0.2),
        hue=fn.random.uniform(range=[-36.0, 36.0]),
    )
    image = sometimes(0.8, jittered, image)
    image = sometimes(0.2, fn.hsv(image, saturation=0.0), image)
    blurred = fn.gaussian_blur(image, window_size=9, sigma=fn.random.uniform(range=[0.1, 2.0]))
    image = sometimes(blur, blurred, image)
    if solarize:
        above = fn.cast(image >= 128, dtype=types.UINT8)
        image = sometimes(solarize, above * (255 - image) + (1 - above) * image, image)
    return normalize(image)


@pipeline_def(batch_size=64, device_id=None)
def loader(shards, recipe):
    encoded = fn.readers.webdataset(
        paths=shards, ext=["jpg"], random_shuffle=True, initial_fill=100, missing_component_behavior="error"
    )
    image = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    if recipe == "single":
        return normalize(crop(image, 224, [0.08, 1.0]))
    views = [view(image, 224, [0.32, 1.0], 1.0, 0.0), view(image, 224, [0.32, 1.0], 0.1, 0.2)]
    return *views, *[view(image, 96, [0.05, 0.32], 0.5, 0.0) for _ in range(8)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards")
    parser.add_argument("--recipe", choices=["dinov2", "single"], default="dinov2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    pipe = loader(sorted(glob.glob(args.shards)), args.recipe, num_threads=args.threads)
    pipe.build()
    for _ in range(3):
        pipe.run()
    start, n = time.time(), 0
    while time.time() - start < args.seconds:
        pipe.run()
        n += 64
    print(f"{n / (time.time() - start):.1f} images/s")


if __name__ == "__main__":
    main()
