"""What gpu.sh has found, as one table in Markdown; and CubeCL's log of launches, summed by kernel.

    python scripts/bench/gpu_table.py table FOLDER RESULTS JSON
    python scripts/bench/gpu_table.py kernels LOG
"""

import collections
import datetime
import json
import pathlib
import re
import sys

MODELS = {"s": "ViT-S/16, batch 64", "b": "ViT-B/16, batch 64", "l": "ViT-L/16, batch 32"}
PROGRAMS = {
    "ocelli-cublaslt": "Ocelli",
    "ocelli-cubecl": "Ocelli, CubeCL's products",
    "torch": "PyTorch, eager",
    "torch--compile": "PyTorch, compiled",
}

# Written down before the first measurement, from a model of the H200 (products at 0.72 of the roofline, 13.6 to 20.6 µs a launch for
# the host, which 1,480 launches keep busy for 20 to 31 ms). A miss in either direction is explained before the next change.
EXPECTED = {"ms": (45, 61), "of compiled PyTorch": (1.0, 1.35), "of CubeCL's products": (0.35, 0.5)}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def load(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def table(folder, results, out):
    found = {(p, m): load(folder / f"{p}-{m}.json") for p in PROGRAMS for m in MODELS}
    out.write_text(json.dumps({f"{p}-{m}": report for (p, m), report in found.items() if report}, indent=1))
    devices = {report["device"] for report in found.values() if report}
    torches = {report["torch"] for report in found.values() if report and "torch" in report}
    print(f"{datetime.date.today()}: {', '.join(sorted(devices)) or 'nothing measured'}; torch {', '.join(torches) or '-'}\n")
    print("| checked | |\n|---|---|")
    for line in results.read_text().splitlines():
        name, _, how = line.partition("|")
        print(f"| {name} | {how} |")
    print("\n| DINO step, 2 views of 224 and 8 of 96, bf16 (PyTorch: autocast, f32 residuals) | images/s | ms | TFLOP/s | of a large product | memory, GB |")
    print("|---|---|---|---|---|---|")
    # One measure for all: the fastest large product that either side has made.
    peak = max((report.get("matrix_peak_tflops") or 0 for report in found.values() if report), default=0)
    for model, what in MODELS.items():
        ours = found["ocelli-cublaslt", model] or found["ocelli-cubecl", model]
        for program, name in PROGRAMS.items():
            report = found[program, model]
            if not report:
                continue
            if program.startswith("ocelli") and report.get("graphs_kept") == 0:
                name += ", no graph kept"
            tflops, memory = report.get("tflops"), report.get("memory_bytes")
            if tflops is None and ours:
                # The same step has the same operations.
                tflops = ours["tflops"] * ours["step_ms"] / report["step_ms"]
            share = f"{100 * tflops / peak:.0f} %" if tflops and peak else "-"
            print(
                f"| {what}, {name} | {report['images_per_s']:.0f} | {report['step_ms']:.1f} | "
                f"{f'{tflops:.1f}' if tflops else '-'} | {share} | {f'{memory / 1e9:.1f}' if memory else '-'} |"
            )
    expectations({program: found[program, "s"] for program in PROGRAMS})
    layers(folder)
    for name in ("ocelli", "torch"):
        report = load(folder / f"resnet-{name}.json")
        if report:
            print(f"\nResNet-18, 32 px, batch 128, bf16, forwards and backwards, {name}: {report}")
    print("\n| ms by phase | |\n|---|---|")
    for (program, model), report in found.items():
        if report:
            phases = ", ".join(f"{name.replace('_', ' ')} {ms:.1f}" for name, ms in report["phases_ms"].items())
            print(f"| {MODELS[model]}, {PROGRAMS[program]} | {phases} |")


def layers(folder):
    """Every layer by itself, beside PyTorch's."""
    rows = []
    for model in MODELS:
        ours = load(folder / f"layers-ocelli-{model}.json")
        theirs = load(folder / f"layers-torch-{model}.json") or {"layers": []}
        ms = {(row["layer"], row["tokens"]): row for row in theirs["layers"]}
        for row in (ours or {"layers": []})["layers"]:
            peer = ms.get((row["layer"], row["tokens"]))
            seen = f"{peer['forward_ms']:.3f} | {peer['both_ms']:.3f}" if peer else "- | -"
            errors = ", ".join("not finite" if error is None else f"{error:.0e}" for error in row["errors"])
            right = "right" if row["right"] else "WRONG"
            if "no device" in ours["device"]:
                right = "nothing is computed"
            rows.append(
                f"| ViT-{model.upper()}, {row['layer']}, {row['tokens']} | {row['forward_ms']:.3f} | {row['both_ms']:.3f} | {seen} | {errors} | {right} |"
            )
    operations = [row for model in MODELS for row in (load(folder / f"layers-ocelli-{model}.json") or {}).get("operations", [])]
    wrong = sorted({row["operation"] for row in operations if not row["right"]})
    if operations and "no device" not in (load(folder / "layers-ocelli-s.json") or {}).get("device", "no device"):
        print(f"\nOperations between layers beside the CPU's: {len(operations) - len(wrong)} right; wrong: {', '.join(wrong) or 'none'}")
    if rows:
        print("\n| layer, tokens | forward, ms | and back | PyTorch's | and back | errors beside f64 of y, gx, gW, gb | |")
        print("|---|---|---|---|---|---|---|")
        print("\n".join(rows))


def expectations(found):
    """What was expected of a step of ViT-S/16 on an H200, beside what was seen."""
    ms = {program: report["step_ms"] for program, report in found.items() if report}
    ours = ms.get("ocelli-cublaslt")
    if not ours or "no device" in found["ocelli-cublaslt"]["device"]:
        return
    seen = {"ms": ours}
    if "torch--compile" in ms:
        seen["of compiled PyTorch"] = ours / ms["torch--compile"]
    if "ocelli-cubecl" in ms:
        seen["of CubeCL's products"] = ours / ms["ocelli-cubecl"]
    print("\n| ViT-S/16, batch 64 | expected on an H200 | seen | |\n|---|---|---|---|")
    for what, value in seen.items():
        low, high = EXPECTED[what]
        verdict = "as expected" if low <= value <= high else "below: explain" if value < low else "ABOVE: explain"
        print(f"| {what} | {low} to {high} | {value:.2f} | {verdict} |")


def kernels(log):
    """A launch is a row of the log, `| 91.075µs | KernelBinop | AddOp_7bd8b6a4`; what ends in a hash is one kernel."""
    times, counts = collections.Counter(), collections.Counter()
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"\|\s*([\d.]+)(ns|us|µs|ms|s)\s*\|\s*(.+)$", line)
        if found:
            name = re.sub(r"_[0-9a-f]{8}\b", "", found[3]).strip()[:90]
            times[name] += float(found[1]) * UNITS[found[2]]
            counts[name] += 1
    total = sum(times.values())
    if not total:
        print(f"no timed launch in {log}: its form may have changed")
        return
    print(f"{'ms':>10} {'share':>7} {'launches':>9}  kernel")
    for name, seconds in times.most_common(25):
        print(f"{1e3 * seconds:10.2f} {100 * seconds / total:6.1f}% {counts[name]:9}  {name}")


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    {"table": table, "kernels": kernels}[verb](*map(pathlib.Path, paths))
