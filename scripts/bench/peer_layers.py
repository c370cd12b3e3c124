"""The other side of `ocelli bench layers`: affine layers of a transformer in PyTorch, forwards and backwards.

    python scripts/bench/peer_layers.py --width 384 --tokens 25216 18944 [--device cuda]
"""

import argparse
import json
import statistics
import time

import torch

PASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, nargs="+", default=[25216])
    parser.add_argument("--f32", action="store_true", help="f32 (TF32 on a GPU) instead of bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    number = torch.float32 if args.f32 else torch.bfloat16
    on_gpu = args.device != "cpu"

    def times(run) -> float:
        all_ms = []
        for _ in range(args.repeats + 1):
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(PASSES):
                run()
            if on_gpu:
                torch.cuda.synchronize()
            all_ms.append(1e3 * (time.perf_counter() - start) / PASSES)
        # The first round chooses algorithms.
        return statistics.median(all_ms[1:])

    layers = [("qkv", 1, 3), ("proj", 1, 1), ("fc1", 1, 4), ("fc2", 4, 1)]
    rows = []
    for tokens in args.tokens:
        for name, before, behind in layers:
            d, o = before * args.width, behind * args.width
            x = torch.randn(tokens, d, device=args.device, dtype=number, requires_grad=True)
            # As under autocast: the weight is cast once, its gradient is in its type.
            weight = torch.randn(o, d, device=args.device, dtype=number, requires_grad=True)
            bias = torch.randn(o, device=args.device, dtype=number, requires_grad=True)
            g = torch.randn(tokens, o, device=args.device, dtype=number)

            def forward() -> torch.Tensor:
                with torch.no_grad():
                    return torch.nn.functional.linear(x, weight, bias)

            def both() -> None:
                x.grad = weight.grad = bias.grad = None
                torch.nn.functional.linear(x, weight, bias).backward(g)

            forward_ms, both_ms = times(forward), times(both)
            print(f"{name:<5} {tokens:>7} {f'[{o}, {d}]':>16}  {forward_ms:6.3f} ms  {both_ms:6.3f} ms")
            rows.append({"layer": name, "tokens": tokens, "forward_ms": forward_ms, "both_ms": both_ms})
    where = torch.cuda.get_device_name() if on_gpu else "cpu"
    print(json.dumps({"device": where, "torch": torch.__version__, "layers": rows}))


if __name__ == "__main__":
    main()
