#!/usr/bin/env python3
"""The server against ONNX Runtime alone, on one machine in one run.

For each model: ONNX Runtime alone in every layout and batch size (same library, same session options); then the best of them
and the server under closed-loop load from a separate process take turns, and neighbouring turns are compared. Prints the
table and writes it, with the machine, to load-tests/results/bench.md (--output).
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from common import ROOT, Server, Turns, cpu_seconds, machine, quartiles, resident_mib, target_folder

def ort_alone(folder, library, model, case, seconds, batches, layouts):
    found = subprocess.run([folder / "examples/ort_alone", "--library", library, "--model", model, "--case", case,
                            "--seconds", str(seconds), "--batches", batches, "--layouts", layouts],
                           capture_output=True, check=True, text=True)
    return [json.loads(line) for line in found.stdout.splitlines()]


def busy_turn(server, generator, seconds):
    before = cpu_seconds(server.process.pid)
    result = generator.turn(seconds)
    result["cpu_seconds_per_row"] = (cpu_seconds(server.process.pid) - before) / result["rows"]
    return result


def median_entries(rounds):
    """The median of each layout and batch over the rounds."""
    table = {}
    for entries in rounds:
        for entry in entries:
            table.setdefault((entry["layout"], entry["batch"]), []).append(entry)
    return {key: {field: statistics.median(entry[field] for entry in entries)
                  for field in ("rows_per_second", "cpu_seconds_per_row", "median_seconds")}
            for key, entries in table.items()}


def bench(arguments, folder, case, model):
    alone = lambda layout, batch, *flags: Turns(folder / "examples/ort_alone", "--library", arguments.library, "--model", model,
                                               "--case", case, "--layouts", layout, "--batches", batch, *flags)
    table = median_entries([ort_alone(folder, arguments.library, model, case, arguments.alone_seconds, arguments.batches,
                                      arguments.layouts) for _ in range(2)])
    layout, batch = max(table, key=lambda key: table[key]["rows_per_second"])
    server = Server(folder / "concertina", arguments.models)
    try:
        instances = server.instances(case.split(":")[0])
        # One request computes on the threads of one instance, so that is what it is compared with.
        threads = max(1, os.cpu_count() // instances)
        load = lambda connections, *flags: Turns(folder / "examples/loadgen", "--address", server.address, "--case", case,
                                                 "--connections", connections, *flags, ready=True)
        best, single, rested = alone(layout, batch), alone(f"1x{threads}", 1), alone(f"1x{threads}", 1, "--pause-microseconds", 200)
        busy, lonely = load(arguments.connections), load(1)
        pairs, lonelies = [], []
        # What the server has measured while loading, alone on the machine, it corrects by its first batches under load.
        busy.turn(10)
        for turn in range(arguments.rounds + 1):
            order = [lambda: best.turn(arguments.seconds), lambda: busy_turn(server, busy, arguments.seconds)]
            pair = [order[0](), order[1]()] if turn % 2 else [order[1](), order[0]()][::-1]
            three = single.turn(arguments.seconds / 2), rested.turn(arguments.seconds / 2), lonely.turn(arguments.seconds / 2)
            # The first turn warms all of them.
            if turn:
                pairs.append(pair)
                lonelies.append(three)
        memory = resident_mib(server.process.pid)
        for program in (best, single, rested, busy, lonely):
            program.stop()
    finally:
        server.stop()
    middle = lambda values: statistics.median(values)
    return {
        "case": case,
        "alone_best": f"{layout} batch {batch}",
        "alone_rows": middle(a["rows_per_second"] for a, _ in pairs),
        "alone_cpu": middle(a["cpu_seconds_per_row"] for a, _ in pairs),
        "server_rows": middle(s["rows_per_second"] for _, s in pairs),
        "server_cpu": middle(s["cpu_seconds_per_row"] for _, s in pairs),
        "rows_ratio": quartiles(s["rows_per_second"] / a["rows_per_second"] for a, s in pairs),
        "cpu_ratio": quartiles(s["cpu_seconds_per_row"] / a["cpu_seconds_per_row"] for a, s in pairs),
        "layout": f"{instances}x{threads}",
        "single": middle(a["median_seconds"] for a, _, _ in lonelies),
        "rested": middle(a["median_seconds"] for _, a, _ in lonelies),
        "lonely": middle(s["p50_seconds"] for _, _, s in lonelies),
        "added": quartiles(s["p50_seconds"] - a["median_seconds"] for a, _, s in lonelies),
        "added_rested": quartiles(s["p50_seconds"] - a["median_seconds"] for _, a, s in lonelies),
        "errors": sum(r["errors"] + r["wrong"] for r in [s for _, s in pairs] + [s for _, _, s in lonelies]),
        "memory": memory,
        "table": table,
    }


def render(arguments, results):
    three = lambda values, scale=1: f"{values[1] * scale:.2f} ({values[0] * scale:.2f} to {values[2] * scale:.2f})"
    lines = [
        "# The server against ONNX Runtime alone", "",
        machine() + "  ",
        f"Command: `make bench`; the server and ONNX Runtime alone (with its own allocator) take turns of {arguments.seconds:g} s, "
        f"{arguments.rounds} times each, after 10 s of load; ratios and differences are of neighbouring turns: median (quartiles). Load: "
        f"{arguments.connections} connections, closed loop, one row a request, binary tensors, every answer checked against the row "
        "that asked, from a process whose CPU is not counted but which shares the cores.", "",
        "| at saturation | ORT alone, best | rows/s | CPU ms/row | server's layout | rows/s | CPU ms/row | rows/s ratio | CPU ratio | errors |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['case']} | {r['alone_best']} | {r['alone_rows']:.0f} | {r['alone_cpu'] * 1e3:.3f} | {r['layout']} | {r['server_rows']:.0f} | "
            f"{r['server_cpu'] * 1e3:.3f} | {three(r['rows_ratio'])} | {three(r['cpu_ratio'])} | {r['errors']} |")
    lines += ["", "| a lonely request | ORT alone at batch 1, ms | the same, 0.2 ms of rest before each run, ms | server, ms | "
              "added to the first, ms | added to the second, ms |", "|---|---|---|---|---|---|"]
    for r in results:
        lines.append(f"| {r['case']} | {r['single'] * 1e3:.2f} | {r['rested'] * 1e3:.2f} | {r['lonely'] * 1e3:.2f} | "
                     f"{three(r['added'], 1e3)} | {three(r['added_rested'], 1e3)} |")
    lines += ["", "ONNX Runtime alone, rows per second (CPU ms per row); a layout IxT is I sessions with T threads each:", ""]
    for r in results:
        layouts = sorted({layout for layout, _ in r["table"]})
        lines += [f"| {r['case']}: batch | " + " | ".join(layouts) + " |", "|---" * (len(layouts) + 1) + "|"]
        for batch in sorted({batch for _, batch in r["table"]}):
            cells = [f"{r['table'][(layout, batch)]['rows_per_second']:.0f} "
                     f"({r['table'][(layout, batch)]['cpu_seconds_per_row'] * 1e3:.2f})" for layout in layouts]
            lines.append(f"| {batch} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="models")
    parser.add_argument("--library", default=os.environ.get("CONCERTINA_ONNXRUNTIME", ".setup/onnxruntime/libonnxruntime.so.1.31.1"))
    parser.add_argument("--cases", default="minilm:64,magika")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--alone-seconds", type=float, default=0.7)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--layouts", default=f"1x{os.cpu_count()},{os.cpu_count()}x1,1x1")
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/bench.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    results = []
    for case in arguments.cases.split(","):
        name = case.split(":")[0]
        model = sorted((ROOT / arguments.models / name).glob("*/model.onnx"))[-1]
        print(f"measuring {case} ...", file=sys.stderr, flush=True)
        results.append(bench(arguments, folder, case, model))
    text = render(arguments, results)
    print(text)
    pathlib.Path(arguments.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
