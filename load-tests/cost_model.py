#!/usr/bin/env python3
"""How well the server predicts the memory of its batches: many mixed runs, what was predicted for each against what it used.

Requests of random sizes (1 to 32 rows, small ones as likely as large ones) and, where rows vary in length, random lengths, to
several models at once over connections that never rest, while the memory limit changes as well. Every batch counts, the
first of its kind too. Reads the server's own histogram, whose bounds are 0.95, 1.0 and 1.05. Prints the table, writes it to
load-tests/results/cost_model.md (--output), and exits 1 if a goal is missed.
"""
import argparse
import http.client
import json
import multiprocessing
import pathlib
import random
import shutil
import struct
import sys
import tempfile
import threading
import time

from common import ROOT, Server, machine, target_folder

MODELS = ["wide", "conv", "varlen", "minilm"]
ROWS = 32
# Of all observations: at most so many under what was used, and at most so many further away than 5%.
MOST_UNDER, MOST_FAR = 0.001, 0.01


def tensors(model, rows, chance):
    """Inputs of a request as (name, datatype, shape, bytes)."""
    if model == "wide":
        return [("x", "FP32", [rows, 1], b"".join(struct.pack("<f", chance.random()) for _ in range(rows)))]
    if model == "conv":
        return [("image", "FP32", [rows, 3, 16, 16], struct.pack("<f", chance.random()) * (rows * 768))]
    length = min(256, max(8, round(chance.lognormvariate(3.46, 0.7))))
    ones = struct.pack("<q", 1) * (rows * length)
    if model == "varlen":
        return [("ids", "INT64", [rows, length], ones), ("mask", "INT64", [rows, length], ones)]
    zeros = bytes(8 * rows * length)
    return [("input_ids", "INT64", [rows, length], struct.pack("<q", 2003) * (rows * length)),
            ("attention_mask", "INT64", [rows, length], ones), ("token_type_ids", "INT64", [rows, length], zeros)]


def body(model, rows, chance):
    """A request in the binary form, and the length of its JSON part."""
    parts = tensors(model, rows, chance)
    inputs = [{"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
              for name, datatype, shape, data in parts]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + b"".join(data for *_, data in parts), len(head)


def client(address, seed, over, failures):
    """One connection that never rests."""
    chance, connection = random.Random(seed), http.client.HTTPConnection(address, timeout=60)
    while not over.is_set():
        # minilm takes a hundred times as long as the others: one request in fifty, and fewer rows.
        model = chance.choices(MODELS, [30, 30, 30, 2])[0]
        rows = round(2 ** chance.uniform(0, 3 if model == "minilm" else 5))
        payload, head = body(model, rows, chance)
        connection.request("POST", f"/v2/models/{model}/infer", payload, {"Inference-Header-Content-Length": str(head)})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            failures.append(f"{model} {rows}: {answer.status} {text[:200]!r}")
            return


def clients(address, seed, count, over, queue):
    """A process full of connections."""
    failures = []
    threads = [threading.Thread(target=client, args=(address, seed * 1000 + number, over, failures)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put(failures)


def counts(server, model):
    """Observations in all, under or at 0.95, at or under 1.0, at or under 1.05 of what was predicted."""
    at = lambda edge: server.metric("concertina_estimate_ratio_bucket", of="bytes", model=model, le=edge)
    return [int(at(edge)) for edge in ("+Inf", "0.95", "1", "1.05")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--connections", type=int, default=4, help="of each process")
    parser.add_argument("--most-seconds", type=float, default=600)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/cost_model.md"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as models:
        for model in MODELS:
            shutil.copytree(ROOT / ("models" if model == "minilm" else "tests/models") / model, pathlib.Path(models) / model)
        server = Server(target_folder() / "concertina", models, "--set", "model.warmup.seconds=1")
        full = server.memory()["devices"][0]["limit"]
        over, queue = multiprocessing.Event(), multiprocessing.Queue()
        processes = [multiprocessing.Process(target=clients, args=(server.address, number, arguments.connections, over, queue))
                     for number in range(arguments.processes)]
        for process in processes:
            process.start()
        begin, chance, done = time.monotonic(), random.Random(1), 0
        committed = server.memory()["devices"][0]["committed"]
        while done < arguments.runs and time.monotonic() - begin < arguments.most_seconds:
            time.sleep(0.5)
            # Tight for one half second, then free again: batches of other sizes than the load alone would make.
            server.memory(limit=int(committed + chance.uniform(32, 256) * 2**20) if chance.random() < 0.5 else full)
            done = sum(counts(server, model)[0] for model in MODELS)
        seconds = time.monotonic() - begin
        over.set()
        failures = [failure for _ in processes for failure in queue.get()]
        for process in processes:
            process.join()
        table = {model: counts(server, model) for model in MODELS}
        server.stop()
    table["all"] = [sum(column) for column in zip(*table.values())]
    lines = ["# Predicted against observed memory", "", machine() + "  ",
             f"Command: `load-tests/cost_model.py {' '.join(sys.argv[1:])}`; {arguments.processes * arguments.connections} connections, {seconds:.0f} s, "
             f"{len(failures)} failed requests. Goals: at most {MOST_UNDER:.1%} of the runs used more than predicted, at most {MOST_FAR:.0%} are off by more than 5%.",
             "", "| model | runs | used more than predicted | off by more than 5% | more than 5% above | 5% or more below |", "|---|---|---|---|---|---|"]
    for model, (total, low, exact, high) in table.items():
        part = lambda count: f"{count} ({count / max(total, 1):.3%})"
        lines.append(f"| {model} | {total} | {part(total - exact)} | {part(total - high + low)} | {part(total - high)} | {part(low)} |")
    text = "\n".join(lines)
    print(text)
    for failure in failures[:3]:
        print(failure)
    pathlib.Path(arguments.output).write_text(text + "\n")
    total, low, exact, high = table["all"]
    if failures or total < arguments.runs or total - exact > MOST_UNDER * total or total - high + low > MOST_FAR * total:
        sys.exit("a goal is missed")


if __name__ == "__main__":
    main()
