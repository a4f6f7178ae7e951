"""Whether ONNX Runtime's own graph optimisations reach its fused attention for a usual BERT export, and what that is worth.

    python3 load-tests/fused.py [--out FILE.md] [--seconds 5] [MODEL.onnx]

Without a model it writes BERT-base fp16 of gpu_models.py into a folder for itself, which needs torch and transformers. For each level
of optimisation it saves the optimised graph, counts its kinds of nodes, and measures rows per second at 64 rows of 128 tokens with
bound inputs and outputs; each level's answers to 64 rows, and to the first of them alone, are compared with those of the graph that is
not optimised at all. Two more lines: the same graph rewritten by onnxruntime.transformers, with the fused attention kernels that it
may pick at run time, and without them. Prints a table; exits with 1 if no level ran. Sessions of the server use the level `all`.
"""
import argparse
import collections
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy
import onnx
import onnxruntime

ROWS, TOKENS = 64, 128
# Kinds of nodes that say whether attention is fused, and what else is.
TELLING = ["Attention", "MultiHeadAttention", "PackedAttention", "QAttention", "SkipLayerNormalization", "LayerNormalization",
           "EmbedLayerNormalization", "BiasGelu", "FastGelu", "Gelu", "FusedMatMul", "MatMul", "Softmax"]
LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def batch(session):
    """Texts of different lengths, so that the mask is not all ones."""
    random = numpy.random.default_rng(7)
    ids = random.integers(1000, 20000, (ROWS, TOKENS))
    lengths = random.integers(TOKENS // 4, TOKENS + 1, (ROWS, 1))
    mask = (numpy.arange(TOKENS)[None, :] < lengths).astype(numpy.int64)
    known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": numpy.zeros_like(ids)}
    kinds = {"tensor(int64)": numpy.int64, "tensor(int32)": numpy.int32}
    return {one.name: known[one.name].astype(kinds[one.type]) for one in session.get_inputs()}


def open_session(file, level, provider, optimised=None):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 3
    if optimised:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(str(file), options, providers=[provider])


def kinds(file):
    nodes = collections.Counter(node.op_type for node in onnx.load(str(file), load_external_data=False).graph.node)
    told = ", ".join(f"{kind} {nodes[kind]}" for kind in TELLING if nodes[kind])
    return f"{sum(nodes.values())} nodes: {told}"


def rate(session, inputs, seconds, device):
    """Rows per second, the median of five rounds."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value, device, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, device)
    for _ in range(5):
        session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    rates = []
    for _ in range(5):
        runs, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds / 5:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            runs += 1
        rates.append(runs * ROWS / spent)
    return sorted(rates)[2]


def difference(answer, expected):
    """The largest distance, relative to the largest value that is expected in the same row; what is not a number is infinite."""
    worst = 0.0
    for one, other in zip(answer, expected):
        one, other = (numpy.asarray(value, numpy.float64).reshape(len(value), -1) for value in (one, other))
        apart = numpy.abs(one - other).max(1) / numpy.maximum(numpy.abs(other).max(1), 1e-6)
        worst = max(worst, float(apart.max()) if numpy.isfinite(one).all() else float("inf"))
    return worst


def rewritten(file, folder):
    """The graph as onnxruntime.transformers rewrites it; a text says why there is none."""
    try:
        from onnxruntime.transformers import optimizer
        from onnxruntime.transformers.fusion_options import FusionOptions
        options = FusionOptions("bert")
        model = optimizer.optimize_model(str(file), model_type="bert", num_heads=0, hidden_size=0, optimization_options=options,
                                         opt_level=0, use_gpu=True)
        target = pathlib.Path(folder, "rewritten.onnx")
        model.save_model_to_file(str(target))
        return target
    except Exception as error:  # whatever it is, it is what the table has to say
        return f"{type(error).__name__}: {error}"


def measure(name, file, level, environment, arguments, folder):
    """One line, in a process of its own: some switches are read once."""
    command = [sys.executable, __file__, "--one", name, "--level", level, "--folder", str(folder), "--seconds",
               str(arguments.seconds), str(file)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return [name, "", "", "", f"failed: {last[:200]}"]
    return done.stdout.strip().splitlines()[-1].split("\t")


def one(arguments):
    available = onnxruntime.get_available_providers()
    provider = "CUDAExecutionProvider" if "CUDAExecutionProvider" in available else "CPUExecutionProvider"
    device = "cuda" if provider.startswith("CUDA") else "cpu"
    optimised = pathlib.Path(arguments.folder, f"{arguments.one}.onnx".replace(" ", "-"))
    session = open_session(arguments.model, arguments.level, provider, optimised)
    if session.get_providers()[0] != provider:
        sys.exit(f"the session runs on {session.get_providers()}")
    inputs = batch(session)
    answer = session.run(None, inputs)
    first = session.run(None, {name: value[:1] for name, value in inputs.items()})
    plain = pathlib.Path(arguments.folder, "expected.npz")
    if not plain.exists():
        numpy.savez(plain, *answer, *first)
    kept = numpy.load(plain)
    expected = [kept[key] for key in kept.files]
    apart = difference([*answer, *first], expected)
    nodes = kinds(optimised)
    rows = rate(session, inputs, arguments.seconds, device)
    print("\t".join([arguments.one, f"{rows:.0f}", f"{ROWS / rows * 1000:.2f}", f"{apart:.1e}", nodes]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--out")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--level", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return one(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.model
        if not file:
            import gpu_models
            gpu_models.export(folder, "bert16")
            file = pathlib.Path(folder, "bert16", "1", "model.onnx")
        lines = [measure(level, file, level, {}, arguments, folder) for level in LEVELS]
        other = rewritten(file, folder)
        if isinstance(other, str):
            lines.append(["rewritten", "", "", "", other[:200]])
        else:
            lines.append(measure("rewritten", other, "all", {}, arguments, folder))
            off = {"ORT_DISABLE_FUSED_ATTENTION": "1", "ORT_DISABLE_FUSED_CROSS_ATTENTION": "1", "ORT_DISABLE_FLASH_ATTENTION": "1",
                   "ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "1"}
            lines.append(measure("rewritten, kernels off", other, "all", off, arguments, folder))
    head = ["optimisation", f"rows/s at {ROWS}", "ms", "largest relative difference", "the optimised graph"]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * 5, *lines])
    print(f"ONNX Runtime {onnxruntime.__version__}, {ROWS} rows of {TOKENS} tokens, device {onnxruntime.get_device()}\n\n{table}")
    if arguments.out:
        pathlib.Path(arguments.out).write_text(table + "\n")
    return 0 if any(cells[1] for cells in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
