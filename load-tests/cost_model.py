#!/usr/bin/env python3
"""How well bytes are predicted: at least 100,000 runs of mixed lengths and batch sizes, judged by the server's own metric.

The model is written here: its memory grows with the square of the tokens, as attention's does, and its runs take well below a
millisecond. Writes load-tests/results/cost_model.md (--output); exits 1 if a goal is missed.
"""
import argparse
import pathlib
import random
import subprocess
import sys
import tempfile
import json

from onnx import TensorProto, helper

from common import ROOT, Server, machine, target_folder

LENGTHS = [4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
BOUNDS = [0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0]


def write_model(folder):
    """largest = the largest product of two values of a row, by way of the products of all pairs."""
    node, tensor = helper.make_node, helper.make_tensor_value_info
    nodes = [node("Cast", ["ids"], ["numbers"], to=TensorProto.FLOAT), node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
             node("Mul", ["numbers", "weights"], ["seen"]), node("Unsqueeze", ["seen", "last"], ["column"]),
             node("Unsqueeze", ["seen", "middle"], ["line"]), node("MatMul", ["column", "line"], ["pairs"]),
             node("ReduceMax", ["pairs"], ["square"], axes=[1], keepdims=0), node("ReduceMax", ["square"], ["largest"], axes=[1], keepdims=1)]
    inputs = [tensor(name, TensorProto.INT64, ["batch", "sequence"]) for name in ("ids", "mask")]
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], [axis]) for name, axis in (("last", 2), ("middle", 1))]
    graph = helper.make_graph(nodes, "pairs", inputs, [tensor("largest", TensorProto.FLOAT, ["batch", 1])], constants)
    built = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "pairs/1").mkdir(parents=True)
    (folder / "pairs/1/model.onnx").write_bytes(built.SerializeToString())
    (folder / "pairs/model.toml").write_text(
        f"max_batch_size = 32\npadding = {{ sequence = {{ lengths = {LENGTHS} }}, inputs = {{ ids = 0, mask = 0 }} }}\n")


def ratios(server):
    """Runs by observed over predicted bytes, cumulative."""
    counts = [server.metric("concertina_estimate_ratio_bucket", of="bytes", model="pairs", le=f"{bound:g}") for bound in BOUNDS]
    return counts, server.metric("concertina_estimate_ratio_count", of="bytes", model="pairs")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--most-seconds", type=float, default=180.0)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/cost_model.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    lengths = [random.Random(seed).randint(1, LENGTHS[-1]) for seed in range(200)]
    with tempfile.TemporaryDirectory() as models:
        write_model(pathlib.Path(models))
        server = Server(folder / "concertina", models)
        try:
            requests = wrong = 0
            spent, (counts, runs) = 0.0, ratios(server)
            while runs < arguments.runs and spent < arguments.most_seconds:
                command = [folder / "examples/loadgen", "--address", server.address, "--case", "pairs:8", "--rows", 8, "--mixed-rows", "--distinct",
                           len(lengths), "--lengths", ",".join(map(str, lengths)), "--connections", arguments.connections, "--seconds", arguments.seconds]
                found = subprocess.run([str(part) for part in command], capture_output=True, check=True, text=True)
                result = json.loads(found.stdout)
                requests, wrong = requests + result["requests"], wrong + result["errors"] + result["wrong"]
                spent, (counts, runs) = spent + arguments.seconds, ratios(server)
        finally:
            server.stop()
    within = dict(zip(BOUNDS, counts))
    near = (within[1.05] - within[0.95]) / runs
    under = (runs - within[1.0]) / runs
    goals = [("runs", f"{runs:.0f}", f"at least {arguments.runs}", runs >= arguments.runs),
             ("runs whose observed bytes are 0.95 to 1.05 times the predicted", f"{near:.3%}", "at least 99%", near >= 0.99),
             ("runs that needed more than predicted", f"{under:.3%}", "at most 0.1%", under <= 0.001),
             ("errors and wrong answers", wrong, "0", wrong == 0)]
    lines = ["# The cost model's bytes", "", machine() + "  ",
             f"Command: `python3 load-tests/cost_model.py`; {requests} requests of 1 to 8 rows of 1 to {LENGTHS[-1]} tokens, {arguments.connections} connections; "
             f"rows are padded to one of {len(LENGTHS)} lengths, of which a part was measured while loading; memory grows with the square of the length. "
             "Judged by `concertina_estimate_ratio`.", "",
             "| goal | found | bound | kept |", "|---|---|---|---|"]
    lines += [f"| {name} | {found} | {bound} | {'yes' if kept else '**no**'} |" for name, found, bound, kept in goals]
    lines += ["", "| observed over predicted, at most | runs |", "|---|---|"]
    lines += [f"| {bound:g} | {count:.0f} |" for bound, count in within.items()] + [f"| any | {runs:.0f} |"]
    text = "\n".join(lines)
    print(text)
    pathlib.Path(arguments.output).write_text(text + "\n")
    sys.exit(not all(kept for *_, kept in goals))


if __name__ == "__main__":
    main()
