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
PROGRAMS = {"ocelli": "Ocelli", "torch": "PyTorch, eager", "torch--compile": "PyTorch, compiled"}
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
        ours = found["ocelli", model]
        for program, name in PROGRAMS.items():
            report = found[program, model]
            if not report:
                continue
            if program == "ocelli" and report.get("graphs_kept") == 0:
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
    print("\n| ms by phase | |\n|---|---|")
    for (program, model), report in found.items():
        if report:
            phases = ", ".join(f"{name.replace('_', ' ')} {ms:.1f}" for name, ms in report["phases_ms"].items())
            print(f"| {MODELS[model]}, {PROGRAMS[program]} | {phases} |")


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
