#!/usr/bin/env python3
"""A load test: below, at and above capacity in an open loop, rows of mixed lengths, and a squeeze; one report.

Capacity is found with a closed loop first. Each scenario has its own bounds, and the script exits 1 if one is not kept. Runs
`loadgen`, and k6 and oha as well where they are installed. Writes load-tests/results/load.md and load.svg (--output).
"""
import argparse
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from common import ROOT, Server, machine, target_folder

# Name, share of the capacity, lengths of the rows, whether a refusal is a failure.
SCENARIOS = [("below", 0.7, [64], True), ("at", 1.0, [64], False), ("above", 1.5, [64], False), ("mixed", 0.5, [8, 16, 32, 64, 128], True),
             ("squeeze", 0.5, [64], True)]
# What is answered late is refused by its deadline (model.default_timeout), so no answer may be older than that and its run.
OLDEST = 32.0


def load(folder, server, seconds, *flags):
    command = [folder / "examples/loadgen", "--address", server.address, "--case", "minilm:64", "--output", "sentence_embedding",
               "--seconds", str(seconds), *flags]
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"loadgen: {found.stderr}")
    return json.loads(found.stdout)


def squeeze(server, seconds):
    """A third of the time with room for little more than what is always needed, then all of it back."""
    ledger = server.memory()["devices"][0]
    fixed = sum(arena["reserved"] for arena in ledger["arenas"] if arena["kind"] != "run")
    time.sleep(seconds / 3)
    server.memory(limit=int(fixed + (48 << 20)))
    time.sleep(seconds / 3)
    server.memory(limit="auto")


def run(folder, server, capacity, scenario, seconds):
    name, share, lengths, strict = scenario
    side = threading.Thread(target=squeeze, args=(server, seconds)) if name == "squeeze" else None
    if side:
        side.start()
    result = load(folder, server, seconds, "--rate", str(capacity * share), "--connections", "1024", "--lengths", ",".join(map(str, lengths)))
    if side:
        side.join()
    refused = sum(count for status, count in result["refused"].items() if status in ("503", "504"))
    faults = []
    if result["wrong"] or result["errors"] > refused:
        faults.append(f"{result['wrong']} wrong answers, {result['errors'] - refused} errors: {result['first_error']}")
    if strict and refused:
        faults.append(f"{refused} refused: {result['first_error']}")
    if result["quantiles"][-1][1] > OLDEST:
        faults.append(f"an answer took {result['quantiles'][-1][1]:.1f} s")
    return result | dict(name=name, offered=capacity * share, refused=refused, faults=faults)


def tools(server, capacity, seconds):
    """The same load by other people's tools, where they are installed."""
    lines = []
    if shutil.which("k6"):
        for name in ("below", "above", "mixed"):
            found = subprocess.run(["k6", "run", "--quiet", "--no-usage-report", "-e", f"SCENARIO={name}", "-e", f"CAPACITY={capacity:.1f}", "-e",
                                    f"SECONDS={seconds}", "-e", f"URL=http://{server.address}", str(ROOT / "load-tests/k6/infer.js")],
                                   capture_output=True, text=True)
            lines.append(f"k6 {name}: " + ("its thresholds hold" if found.returncode == 0 else f"exit code {found.returncode}: {found.stderr[-300:]}"))
    else:
        lines.append("k6 is not installed: load-tests/k6/infer.js was not run.")
    if shutil.which("oha"):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as body:
            row = {name: value for name, value in [("input_ids", 1000), ("attention_mask", 1), ("token_type_ids", 0)]}
            json.dump({"inputs": [{"name": name, "datatype": "INT64", "shape": [1, 64], "data": [value] * 64} for name, value in row.items()],
                       "outputs": [{"name": "sentence_embedding"}]}, body)
            body.flush()
            found = subprocess.run(["oha", "--no-tui", "--output-format", "json", "-z", f"{seconds}s", "-c", "64", "-q", f"{capacity * 0.7:.0f}",
                                    "--latency-correction", "-m", "POST", "-T", "application/json", "-D", body.name,
                                    f"http://{server.address}/v2/models/minilm/infer"], capture_output=True, text=True)
        answer = json.loads(found.stdout)
        lines.append(f"oha at 0.7: {answer['statusCodeDistribution']}, p99 {answer['latencyPercentiles']['p99'] * 1e3:.0f} ms")
    else:
        lines.append("oha is not installed (`cargo install --locked oha`): its command was not run.")
    return lines


def svg(results):
    """Latency by quantile, one line a scenario; logarithmic."""
    width, height, left, top = 640, 320, 60, 20
    low, high = 1e-3, 60.0
    y = lambda seconds: top + height * (1 - (math.log(min(max(seconds, low), high)) - math.log(low)) / (math.log(high) - math.log(low)))
    x = lambda index: left + width * index / 8
    colours = ["#0072b2", "#009e73", "#d55e00", "#cc79a7", "#7a7a7a"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + left + 120} {height + top + 40}" font-family="sans-serif" font-size="12">',
             '<title>Latency by quantile, from when a request was due</title>', '<rect width="100%" height="100%" fill="white"/>']
    for tick in (0.001, 0.01, 0.1, 1, 10):
        parts.append(f'<path d="M{left} {y(tick):.1f}H{left + width}" stroke="#ddd"/><text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} s</text>')
    for index, (quantile, _) in enumerate(results[0]["quantiles"]):
        parts.append(f'<text x="{x(index):.1f}" y="{top + height + 18}" text-anchor="middle">{quantile:g}</text>')
    for colour, result in zip(colours, results):
        points = " ".join(f"{x(index):.1f},{y(value):.1f}" for index, (_, value) in enumerate(result["quantiles"]) if value)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + width + 8}" y="{y(result["quantiles"][-1][1] or low) + 4:.1f}" fill="{colour}">{result["name"]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def render(capacity, results, lines, seconds):
    text = ["# A load test", "", machine() + "  ",
            f"Command: `make load-test`; minilm at 64 tokens, one row a request, binary tensors, {seconds} s each; capacity by a closed loop of 64 "
            f"connections: {capacity:.0f} rows/s. An open loop after that: latencies count from when a request was due.", "",
            "| scenario | offered/s | answered in all, per second of the load | refused (503, 504) | other errors | wrong | p50, ms | p99, ms | longest, ms | holds |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        text.append(f"| {r['name']} | {r['offered']:.0f} | {r['requests'] / seconds:.0f} | {r['refused']} | {r['errors'] - r['refused']} | {r['wrong']} | "
                    f"{r['p50_seconds'] * 1e3:.0f} | {r['p99_seconds'] * 1e3:.0f} | {r['quantiles'][-1][1] * 1e3:.0f} | {'; '.join(r['faults']) or 'yes'} |")
    return "\n".join([*text, "", "![Latency by quantile](load.svg)", "", *lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/load.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    server = Server(folder / "concertina", "models/minilm", "--model-name", "minilm")
    try:
        capacity = load(folder, server, 8, "--connections", "64")["rows_per_second"]
        results = [run(folder, server, capacity, scenario, arguments.seconds) for scenario in SCENARIOS]
        lines = tools(server, capacity, arguments.seconds)
    finally:
        server.stop()
    output = pathlib.Path(arguments.output)
    text = render(capacity, results, lines, arguments.seconds)
    print(text)
    output.write_text(text)
    output.with_suffix(".svg").write_text(svg(results))
    if any(result["faults"] for result in results):
        sys.exit("not everything holds")


if __name__ == "__main__":
    main()
