#!/usr/bin/env python3
"""Rows of mixed lengths at saturation: packing, against padding in order of arrival, against ONNX Runtime fed sorted batches.

One text a request, their lengths log-normal (median 32 tokens, 8 to 256), on minilm. Two servers that differ in `packing` alone
and ONNX Runtime alone take turns, and neighbouring turns are compared. ONNX Runtime alone gets what no server can have: all rows
at once, sorted, each batch padded to its longest row, in the best of its layouts and batch sizes, which are rows, or tokens once
padded. The beginning of a turn does not count: whoever answers short texts first answers many of them before the long ones that
came with them. Writes load-tests/results/lengths.md (--output); exits 1 if a goal is missed.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

from common import ROOT, Server, Turns, machine, quartiles, target_folder

MEDIAN, SIGMA, SHORTEST, LONGEST = 32, 0.8, 8, 256
CASE = "minilm:64"


def draw(count):
    """Quantiles of the distribution, in an order that only depends on their number."""
    normal = statistics.NormalDist()
    lengths = [MEDIAN * 2.718281828 ** (SIGMA * normal.inv_cdf((rank + 0.5) / count)) for rank in range(count)]
    lengths = [min(LONGEST, max(SHORTEST, round(length))) for length in lengths]
    random.Random(1).shuffle(lengths)
    return lengths


def best_alone(arguments, folder, model, lengths):
    """The layout and batch size that run all rows in the least time, and what each of them gives."""
    command = [folder / "examples/ort_alone", "--library", arguments.library, "--model", model, "--case", CASE, "--seconds", "0.5",
               "--layouts", arguments.layouts, "--lengths", lengths]
    entries = []
    for kind, more in (("rows", ["--batches", arguments.batches]), ("tokens", ["--batches", arguments.tokens, "--padded"])):
        found = subprocess.run([str(part) for part in command + more], capture_output=True, check=True, text=True)
        entries += [{**json.loads(line), "kind": kind} for line in found.stdout.splitlines()]
    return max(entries, key=lambda entry: entry["rows_per_second"]), entries


def settled(arguments, result):
    """Rows per second of a turn of a server, without its beginning."""
    begin, end = round(arguments.beginning * 10), round(arguments.seconds * 10)
    result["rows_per_second"] = sum(result["timeline"][begin:end]) / (arguments.seconds - arguments.beginning)
    return result


def measure(arguments, folder, lengths):
    model = sorted((ROOT / arguments.models / "minilm").glob("*/model.onnx"))[-1]
    text = ",".join(map(str, lengths))
    best, entries = best_alone(arguments, folder, model, text)
    layout = ["--set", "model.instances=2", "--set", "model.intra_op_threads=1"] if os.cpu_count() == 2 else []
    servers = {packing: Server(folder / "concertina", arguments.models, "--set", f"model.packing={packing}", *layout)
               for packing in ("near", "fifo")}
    try:
        turns = {name: Turns(folder / "examples/loadgen", "--address", server.address, "--case", CASE, "--lengths", text, "--distinct",
                             len(lengths), "--connections", arguments.connections, "--output", "sentence_embedding", ready=True)
                 for name, server in servers.items()}
        turns["sorted"] = Turns(folder / "examples/ort_alone", "--library", arguments.library, "--model", model, "--case", CASE,
                                "--batches", best["batch"], "--layouts", best["layout"], "--lengths", text,
                                *(["--padded"] if best["kind"] == "tokens" else []))
        for name in servers:
            turns[name].turn(arguments.warm_up)
        rounds = [{name: turns[name].turn(arguments.seconds) for name in (list(turns) if number % 2 else list(turns)[::-1])}
                  for number in range(arguments.rounds)]
        for name in servers:
            rounds = [{**turn, name: settled(arguments, turn[name])} for turn in rounds]
        print(json.dumps([{name: {field: turn[name].get(field) for field in ("rows_per_second", "p99_seconds", "quantiles")} for name in turn} for turn in rounds]), file=sys.stderr)
        for program in turns.values():
            program.stop()
        tokens = {name: server.metric("concertina_batch_rows_sum", model="minilm") / server.metric("concertina_batch_rows_count", model="minilm")
                  for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()
    return best, entries, rounds, tokens


def render(arguments, best, entries, rounds, rows):
    ratio = lambda value, over: quartiles(r[value]["rows_per_second"] / r[over]["rows_per_second"] for r in rounds)
    three = lambda values: f"{values[1]:.2f} ({values[0]:.2f} to {values[2]:.2f})"
    middle = lambda name, field: statistics.median(r[name][field] for r in rounds)
    packed, of_sorted = ratio("near", "fifo"), ratio("near", "sorted")
    tail = quartiles(r["near"]["p99_seconds"] / r["fifo"]["p99_seconds"] for r in rounds)
    bad = sum(r[name]["errors"] + r[name]["wrong"] for r in rounds for name in ("near", "fifo"))
    goals = [("packing over fifo, rows/s", three(packed), "at least 1.3", packed[1] >= 1.3),
             ("p99 of packing over that of fifo", three(tail), "at most 1", tail[1] <= 1),
             ("packing over sorted batches, rows/s", three(of_sorted), "at least 0.95", of_sorted[1] >= 0.95),
             ("errors and wrong answers", bad, "0", bad == 0)]
    lines = [
        "# Rows of mixed lengths", "", machine() + "  ",
        f"Command: `python3 load-tests/lengths.py`; minilm, one text a request, {arguments.texts} texts of log-normal lengths (median {MEDIAN} "
        f"tokens, sigma {SIGMA}, {SHORTEST} to {LONGEST}; mean {statistics.mean(draw(arguments.texts)):.1f}), {arguments.connections} connections, closed "
        f"loop; turns of {arguments.seconds:g} s without the first {arguments.beginning:g}, {arguments.rounds} of each, after {arguments.warm_up:g} s of load; every answer checked against that to the "
        "same text alone. The load generator shares the cores with the servers and not with ONNX Runtime alone, whose rows are there from the "
        "beginning and sorted. Ratios are of neighbouring turns: median (quartiles).", "",
        "| | rows/s | p50, ms | p99, ms | rows per batch |", "|---|---|---|---|---|"]
    for name, title in (("near", "server, `packing = \"near\"`"), ("fifo", "server, `packing = \"fifo\"`")):
        lines.append(f"| {title} | {middle(name, 'rows_per_second'):.0f} | {middle(name, 'p50_seconds') * 1e3:.0f} | "
                     f"{middle(name, 'p99_seconds') * 1e3:.0f} | {rows[name]:.1f} |")
    lines.append(f"| ONNX Runtime alone, sorted, {best['layout']}, at most {best['batch']} {best['kind']} | {middle('sorted', 'rows_per_second'):.0f} | | | |")
    lines += ["", "| goal | found | bound | kept |", "|---|---|---|---|"]
    lines += [f"| {name} | {found} | {bound} | {'yes' if kept else '**no**'} |" for name, found, bound, kept in goals]
    layouts = sorted({entry["layout"] for entry in entries})
    lines += ["", "ONNX Runtime alone, rows per second by layout (sessions x threads) and the most rows or padded tokens of a batch, measured before:",
              "", "| batch | " + " | ".join(layouts) + " |", "|---" * (len(layouts) + 1) + "|"]
    for kind, batch in sorted({(entry["kind"], entry["batch"]) for entry in entries}):
        cells = [f"{entry['rows_per_second']:.0f}" for layout in layouts for entry in entries
                 if (entry["layout"], entry["kind"], entry["batch"]) == (layout, kind, batch)]
        lines.append(f"| {batch} {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines), all(kept for *_, kept in goals)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="models")
    parser.add_argument("--library", default=os.environ.get("CONCERTINA_ONNXRUNTIME", ".setup/onnxruntime/libonnxruntime.so.1.31.1"))
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--connections", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--beginning", type=float, default=1.5)
    parser.add_argument("--warm-up", type=float, default=8.0)
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--tokens", default="64,128,192,256,384")
    parser.add_argument("--layouts", default=f"1x{os.cpu_count()},{os.cpu_count()}x1")
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/lengths.md"))
    arguments = parser.parse_args()
    text, kept = render(arguments, *measure(arguments, target_folder(), draw(arguments.texts)))
    print(text)
    pathlib.Path(arguments.output).write_text(text + "\n")
    sys.exit(not kept)


if __name__ == "__main__":
    main()
