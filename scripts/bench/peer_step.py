"""The other side of `ocelli bench step --backbone`: timm's ViT-S/16 in PyTorch, f32, on the CPU.

Needs torch and timm. Prints the median time of one forward and backward pass.

    python scripts/bench/peer_step.py --batch 4 --threads 2
"""

import argparse
import json
import statistics
import time

import timm
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=0, global_pool="").train()
    images = torch.randn(args.batch, 3, 224, 224)
    times = []
    for _ in range(args.repeats + 1):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        tokens = model(images)
        (tokens * tokens.detach().sin()).sum().backward()
        times.append(1e3 * (time.perf_counter() - start))
    # The first round warms caches and pools.
    median = statistics.median(times[1:])
    print(f"{args.model}, batch {args.batch}, {args.threads} threads, torch {torch.__version__}: {median:.1f} ms")
    print(json.dumps({"median_ms": median, "times_ms": times[1:]}))


if __name__ == "__main__":
    main()
