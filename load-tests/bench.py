#!/usr/bin/env python3
"""The server against ONNX Runtime alone, on one machine in one run.

For each model: ONNX Runtime alone in every layout and batch size (same library, same session options), then the server
under closed-loop load from a separate process, in alternating rounds; medians. Prints the table and writes it, with the
machine, to load-tests/results/bench.md (--output).
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from common import ROOT, Server, cpu_seconds, machine, resident_mib, target_folder

def ort_alone(folder, library, model, case, seconds, batches, layouts):
    found = subprocess.run([folder / "examples/ort_alone", "--library", library, "--model", model, "--case", case,
                            "--seconds", str(seconds), "--batches", batches, "--layouts", layouts],
                           capture_output=True, check=True, text=True)
    return [json.loads(line) for line in found.stdout.splitlines()]


def load(folder, server, case, connections, seconds):
    before = cpu_seconds(server.process.pid)
    found = subprocess.run([folder / "examples/loadgen", "--address", server.address, "--case", case,
                            "--connections", str(connections), "--seconds", str(seconds)],
                           capture_output=True, check=True, text=True)
    result = json.loads(found.stdout)
    # The distinct requests that are asked one by one before the load count as rows too.
    rows = result["rows"] + 64
    result["cpu_seconds_per_row"] = (cpu_seconds(server.process.pid) - before) / rows
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
    alone, busy, lonely = [], [], []
    server = Server(folder / "concertina", arguments.models)
    try:
        for _ in range(arguments.rounds):
            alone.append(ort_alone(folder, arguments.library, model, case, arguments.alone_seconds, arguments.batches,
                                   arguments.layouts))
            busy.append(load(folder, server, case, arguments.connections, arguments.seconds))
            lonely.append(load(folder, server, case, 1, arguments.seconds / 2))
        memory, instances = resident_mib(server.process.pid), server.instances(case.split(":")[0])
    finally:
        server.stop()
    table = median_entries(alone)
    fastest = max(table, key=lambda key: table[key]["rows_per_second"])
    cheapest = min(table, key=lambda key: table[key]["cpu_seconds_per_row"])
    # One request computes on the threads of one instance, so that is what it is compared with.
    threads = max(1, os.cpu_count() // instances)
    single = table[(f"1x{threads}", 1)]["median_seconds"]
    middle = lambda results, field: statistics.median(result[field] for result in results)
    return {
        "case": case,
        "alone_best": f"{fastest[0]} batch {fastest[1]}",
        "alone_rows": table[fastest]["rows_per_second"],
        "alone_cpu": table[fastest]["cpu_seconds_per_row"],
        "cheapest": f"{cheapest[0]} batch {cheapest[1]}",
        "cheapest_cpu": table[cheapest]["cpu_seconds_per_row"],
        "server_rows": middle(busy, "rows_per_second"),
        "server_cpu": middle(busy, "cpu_seconds_per_row"),
        "alone_single": single,
        "layout": f"{instances}x{threads}",
        "server_lonely": middle(lonely, "p50_seconds"),
        "errors": sum(result["errors"] + result["wrong"] for result in busy + lonely),
        "memory": memory,
        "table": table,
    }


def render(arguments, results):
    lines = [
        "# The server against ONNX Runtime alone", "",
        machine() + "  ",
        f"Command: `make bench`; {arguments.rounds} alternating rounds, medians; load: {arguments.connections} connections, closed "
        "loop, one row a request, binary tensors, every answer checked against the row that asked, from a process whose CPU is "
        "not counted but which shares the cores.", "",
        "| model | ORT alone, best | rows/s | CPU ms/row | server's layout | rows/s | server CPU ms/row | CPU ratio | "
        "ORT batch 1, ms | lonely request, ms | added, ms | errors |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['case']} | {r['alone_best']} | {r['alone_rows']:.0f} | {r['alone_cpu'] * 1e3:.3f} | {r['layout']} | {r['server_rows']:.0f} | "
            f"{r['server_cpu'] * 1e3:.3f} | {r['server_cpu'] / r['alone_cpu']:.2f} | {r['alone_single'] * 1e3:.2f} | "
            f"{r['server_lonely'] * 1e3:.2f} | {(r['server_lonely'] - r['alone_single']) * 1e3:.2f} | {r['errors']} |")
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--alone-seconds", type=float, default=1.0)
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
