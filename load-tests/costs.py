#!/usr/bin/env python3
"""What the server itself costs: CPU time per binary inference of a tiny model, and how fast JSON is read.

The CPU time of the whole server process per request, over that of ONNX Runtime alone for as many rows in batches of the size
that the server formed; turns alternate. Reading JSON is timed by the server (metric stage_seconds_total, stage decode): a tensor
of 262,144 floats (1 MiB), one request at a time. Writes load-tests/results/costs.md; exits 1 above 25 µs or below 300 MB/s.
"""
import argparse
import http.client
import json
import pathlib
import random
import statistics
import sys

from common import ROOT, Server, Turns, cpu_seconds, machine, quartiles, target_folder

MOST_MICROSECONDS = 25
LEAST_MB_PER_SECOND = 300
FLOATS = 1 << 18


def cpu_per_request(folder, arguments):
    """Per turn: microseconds of the server per request, of ONNX Runtime alone per row, rows per batch, requests per second."""
    server = Server(folder / "concertina", "tests/models/affine", "--model-name", "affine")
    load = Turns(folder / "examples/loadgen", "--address", server.address, "--case", "affine", "--connections",
                 arguments.connections, ready=True)
    load.turn(1)
    turns = []
    for _ in range(arguments.turns):
        batches, rows = (server.metric(f"concertina_batch_rows_{part}", model="affine") for part in ("count", "sum"))
        before = cpu_seconds(server.process.pid)
        result = load.turn(arguments.seconds)
        spent = cpu_seconds(server.process.pid) - before
        batches, rows = (server.metric(f"concertina_batch_rows_{part}", model="affine") - old
                         for part, old in (("count", batches), ("sum", rows)))
        if result["errors"] or result["wrong"]:
            sys.exit(f"the load had errors: {result}")
        size = max(1, round(rows / batches))
        alone = Turns(folder / "examples/ort_alone", "--library", arguments.library, "--model",
                      "tests/models/affine/1/model.onnx", "--case", "affine", "--layouts", "1x1", "--batches", size)
        reference = alone.turn(arguments.seconds)
        alone.stop()
        turns.append((spent / result["requests"] * 1e6, reference["cpu_seconds_per_row"] * 1e6, rows / batches,
                      result["requests"] / arguments.seconds))
    load.stop()
    server.stop()
    return turns


def json_rates(folder, arguments):
    """The length of the text in bytes, and per request how many megabytes a second were read."""
    server = Server(folder / "concertina", "tests/models/affine", "--model-name", "affine", "--set", f"http.max_request_rows={FLOATS}",
                    "--set", f"model.max_queue_rows={FLOATS}")
    chance = random.Random(1)
    data = ",".join(repr(round(chance.uniform(-10, 10), 6)) for _ in range(FLOATS))
    tensor = f'{{"name":"x","shape":[{FLOATS // 4},4],"datatype":"FP32","data":[{data}]}}'
    body = f'{{"inputs":[{tensor}],"outputs":[{{"name":"y","parameters":{{"binary_data":true}}}}]}}'.encode()
    connection = http.client.HTTPConnection(server.address, timeout=60)
    rates = []
    for _ in range(arguments.requests):
        before = server.metric("concertina_stage_seconds_total", model="affine", stage="decode")
        connection.request("POST", "/v2/models/affine/infer", body)
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(f"{response.status}: {response.read()[:500]}")
        response.read()
        spent = server.metric("concertina_stage_seconds_total", model="affine", stage="decode") - before
        rates.append(len(body) / spent / 1e6)
    connection.close()
    server.stop()
    return len(body), rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--requests", type=int, default=30, help="of JSON")
    parser.add_argument("--library", default=str(next((ROOT / ".setup/onnxruntime").glob("libonnxruntime.so.*"), "")))
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/costs.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    turns = cpu_per_request(folder, arguments)
    length, rates = json_rates(folder, arguments)
    server, alone, rows, per_second = (quartiles(column) for column in zip(*turns))
    over = statistics.median(turn[0] - turn[1] for turn in turns)
    rate = statistics.median(rates)
    shown = lambda values, digits=1: " / ".join(f"{value:.{digits}f}" for value in values)
    text = "\n".join([
        "# Costs", "", machine() + "  ",
        f"Command: `load-tests/costs.py`; the model `affine` (four floats), binary, {arguments.connections} connections kept alive in a closed loop, "
        f"{arguments.turns} turns of {arguments.seconds:g} s, each followed by one of ONNX Runtime alone (one thread) at the batch size of the turn. "
        "Quartiles.", "",
        "| requests/s | rows per batch | server, µs of CPU per request | ONNX Runtime alone, µs of CPU per row | median difference, µs |",
        "|---|---|---|---|---|",
        f"| {shown(per_second, 0)} | {shown(rows)} | {shown(server)} | {shown(alone, 2)} | {over:.1f} |", "",
        f"Reading JSON, as the server times it: {arguments.requests} requests of {length / 1e6:.2f} MB ({FLOATS} floats of six decimals), one at a time: "
        f"{shown(quartiles(rates), 0)} MB/s.", ""])
    print(text)
    pathlib.Path(arguments.output).write_text(text)
    if over > MOST_MICROSECONDS or rate < LEAST_MB_PER_SECOND:
        sys.exit(f"expected {MOST_MICROSECONDS} µs at most and {LEAST_MB_PER_SECOND} MB/s at least")


if __name__ == "__main__":
    main()
