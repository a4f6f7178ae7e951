#!/usr/bin/env python3
"""The largest batch that runs in N bytes: the server's arenas against ONNX Runtime's own arena with the same limit.

Needs the packages of `make test-setup` (onnxruntime, numpy) on PYTHONPATH. Writes load-tests/results/largest_batch.md.
Each try of ONNX Runtime's arena is a process of its own: an arena cannot be emptied, and its limit is silently lost once
it was exceeded by weights.
"""
import json
import os
import pathlib
import subprocess
import sys

from common import ROOT, machine, target_folder

SIZES, DIM, MOST = (16, 32, 64, 128), 64, 1 << 20
TRY = """
import sys, numpy as np, onnxruntime as ort
path, limit, rows, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ort.set_default_logger_severity(4)
types = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
         "tensor(int16)": np.int16, "tensor(int8)": np.int8, "tensor(uint64)": np.uint64, "tensor(uint32)": np.uint32,
         "tensor(uint16)": np.uint16, "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_, "tensor(float16)": np.float16}
info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
ort.create_and_register_allocator(info, ort.OrtArenaCfg({"max_mem": limit, "arena_extend_strategy": 1, "initial_chunk_size_bytes": -1,
                                                         "max_dead_bytes_per_chunk": -1}))
options = ort.SessionOptions()
options.add_session_config_entry("session.use_env_allocators", "1")
options.intra_op_num_threads, options.enable_mem_pattern = 1, False
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
feed = {i.name: np.zeros([rows if axis == 0 else d if isinstance(d, int) else dim for axis, d in enumerate(i.shape)], types[i.type])
        for i in session.get_inputs()}
session.run(None, feed)
"""


def arena_runs(path, limit, rows):
    return subprocess.run([sys.executable, "-c", TRY, path, str(limit), str(rows), str(DIM)], capture_output=True,
                          env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"}).returncode == 0


def arena_largest(path, limit):
    low, high = 0, 1
    while high < MOST and arena_runs(path, limit, high):
        low, high = high, 2 * high
    # To the last row would take a process each: to one part in fifty is enough to compare.
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if arena_runs(path, limit, middle) else (low, middle)
    return low


def main():
    library = os.environ.get("CONCERTINA_ONNXRUNTIME", str(ROOT / ".setup/onnxruntime/libonnxruntime.so.1.31.1"))
    ours = subprocess.run([target_folder() / "examples/largest_batch", "--library", library, "--models", ROOT / "tests/models"],
                          capture_output=True, check=True, text=True)
    rows = {}
    for line in ours.stdout.splitlines():
        entry = json.loads(line)
        rows[(entry["model"], entry["mebibytes"])] = entry["rows"]
    lines = ["# The largest batch that runs in N MiB of run memory", "", machine() + "  ",
             "Command: `load-tests/largest_batch.py`. In each cell: the server's arenas / ONNX Runtime's own arena with the same limit "
             f"(to one part in fifty). Variable dimensions are {DIM}. `datatypes` is left out: its strings and bf16 have no numpy type.", "",
             "| model | " + " | ".join(f"{size} MiB" for size in SIZES) + " |", "|---" * (len(SIZES) + 1) + "|"]
    behind = []
    for model in sorted({model for model, _ in rows} - {"datatypes", "slow"}):
        cells = []
        for size in SIZES:
            arena = arena_largest(str(ROOT / f"tests/models/{model}/1/model.onnx"), size << 20)
            mine = rows[(model, size)]
            cells.append(f"{mine} / {arena}")
            if mine < arena:
                behind.append(f"{model} at {size} MiB")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    lines += ["", "Behind ONNX Runtime's arena: " + (", ".join(behind) or "nowhere") + "."]
    (ROOT / "load-tests/results/largest_batch.md").write_text("\n".join(lines) + "\n")
    print(lines[-1])


if __name__ == "__main__":
    main()
