"""The other side of `ocelli bench step --backbone`: timm's networks in PyTorch, in f32 or by autocast in bf16.

Needs torch and timm. Prints the median time of one forward and backward pass, and the most memory that the process had
in use beyond what it had before the model was made.

    python scripts/bench/peer_step.py --batch 4 --threads 2 [--bf16]
    python scripts/bench/peer_step.py --model resnet18 --image-px 32 --small-stem --batch 128
    python scripts/bench/peer_step.py --model regnety_008 --batch 8 --channels-last
"""

import argparse
import json
import os
import resource
import statistics
import time

import timm
import torch


def resident_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--image-px", type=int, default=224)
    parser.add_argument("--small-stem", action="store_true", help="3x3 without pooling, of a ResNet for small images")
    parser.add_argument("--channels-last", action="store_true", help="PyTorch's faster layout for convolutions")
    parser.add_argument("--bf16", action="store_true", help="autocast to bf16 in the forward pass")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    before_bytes = resident_bytes()
    model = timm.create_model(args.model, num_classes=0, global_pool="").train()
    if args.small_stem:
        model.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        model.maxpool = torch.nn.Identity()
    images = torch.randn(args.batch, 3, args.image_px, args.image_px)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    model, images = model.to(args.device), images.to(args.device)
    on_gpu = args.device != "cpu"
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    times = []
    for _ in range(args.repeats + 1):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            tokens = model(images)
        tokens = tokens.float()
        (tokens * tokens.detach().sin()).sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    # The first round warms caches and pools.
    median = statistics.median(times[1:])
    layout = "channels last, " if args.channels_last else ""
    number = "bf16" if args.bf16 else "f32"
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_bytes
    if on_gpu:
        peak_bytes = torch.cuda.max_memory_allocated()
    where = torch.cuda.get_device_name() if on_gpu else f"{args.threads} threads"
    print(f"{args.model}, {args.image_px} px, batch {args.batch}, {number}, {layout}{where}, torch {torch.__version__}: {median:.1f} ms, {peak_bytes / 1e6:.0f} MB")
    print(json.dumps({"median_ms": median, "times_ms": times[1:], "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main()
