#!/usr/bin/env python3
"""Write the test models of this folder again, or with `--check` only say whether they would be the same bytes.

A graph is a function below; its docstring says what it computes, README.md has them in a table. Constants are small and
the arithmetic is exact wherever it can be, so that tests compare for equality.
"""
import argparse
import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper

HERE = Path(__file__).resolve().parent
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
MODELS = {}
DATATYPES = {
    "bool": TensorProto.BOOL, "uint8": TensorProto.UINT8, "uint16": TensorProto.UINT16, "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64, "int8": TensorProto.INT8, "int16": TensorProto.INT16, "int32": TensorProto.INT32,
    "int64": INT64, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16, "fp32": FLOAT,
    "fp64": TensorProto.DOUBLE, "bytes": TensorProto.STRING,
}
tensor = helper.make_tensor_value_info
node = helper.make_node


def const(name, value, dtype=np.float32):
    """A named constant."""
    return numpy_helper.from_array(np.array(value, dtype=dtype), name)


def model(build):
    """Register a function that returns nodes, inputs, outputs and constants."""
    MODELS[build.__name__] = build
    return build


@model
def affine():
    """y = 2x + 1."""
    nodes = [node("Mul", ["x", "two"], ["double"]), node("Add", ["double", "one"], ["y"])]
    return (nodes, [tensor("x", FLOAT, ["batch", 4])], [tensor("y", FLOAT, ["batch", 4])],
            [const("two", 2), const("one", 1)])


@model
def wide():
    """y = 3x by way of tensors of 1 MiB a row: a model whose rows cost much memory and which has next to no weights."""
    nodes = [node("Expand", ["x", "shape"], ["spread"]), node("Mul", ["spread", "two"], ["double"]),
             node("Add", ["double", "spread"], ["triple"]), node("ReduceMax", ["triple"], ["y"], axes=[1], keepdims=1)]
    return (nodes, [tensor("x", FLOAT, ["batch", 1])], [tensor("y", FLOAT, ["batch", 1])],
            [const("shape", [1, 1 << 18], np.int64), const("two", 2)])


@model
def conv():
    """Four 3x3 filters (the whole, and three that keep one channel's centre), ReLU, then the sum over the image."""
    filters = np.zeros((4, 3, 3, 3))
    filters[0] = 1
    for channel in range(3):
        filters[channel + 1, channel, 1, 1] = 1
    nodes = [node("Conv", ["image", "filters"], ["edges"], pads=[1, 1, 1, 1]), node("Relu", ["edges"], ["positive"]),
             node("ReduceSum", ["positive", "plane"], ["sums"], keepdims=0)]
    return (nodes, [tensor("image", FLOAT, ["batch", 3, 16, 16])], [tensor("sums", FLOAT, ["batch", 4])],
            [const("filters", filters), const("plane", [2, 3], np.int64)])


@model
def varlen():
    """doubled = 2 * ids for each token; mean = the mean of the ids that the mask lets through, 0 where it lets none."""
    nodes = [
        node("Cast", ["ids"], ["values"], to=FLOAT), node("Cast", ["mask"], ["weights"], to=FLOAT),
        node("Mul", ["values", "two"], ["doubled"]), node("Mul", ["values", "weights"], ["seen"]),
        node("ReduceSum", ["seen", "last"], ["total"], keepdims=1),
        node("ReduceSum", ["weights", "last"], ["count"], keepdims=1), node("Max", ["count", "one"], ["divisor"]),
        node("Div", ["total", "divisor"], ["mean"]),
    ]
    return (nodes, [tensor(name, INT64, ["batch", "sequence"]) for name in ("ids", "mask")],
            [tensor("doubled", FLOAT, ["batch", "sequence"]), tensor("mean", FLOAT, ["batch", 1])],
            [const("two", 2), const("one", 1), const("last", [1], np.int64)])


@model
def nonzero():
    """The coordinates of the elements that are not zero: how many there are depends on the data."""
    nodes = [node("NonZero", ["x"], ["columns"]), node("Transpose", ["columns"], ["coordinates"], perm=[1, 0])]
    return nodes, [tensor("x", FLOAT, ["batch", 4])], [tensor("coordinates", INT64, ["found", 2])], []


@model
def datatypes():
    """out_T = in_T for each of the protocol's datatypes."""
    return ([node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in DATATYPES],
            [tensor(f"in_{name}", datatype, ["batch", "width"]) for name, datatype in DATATYPES.items()],
            [tensor(f"out_{name}", datatype, ["batch", "width"]) for name, datatype in DATATYPES.items()], [])


@model
def no_batch():
    """y = x + [[1, 2, 3], [4, 5, 6]]: no dimension varies."""
    return ([node("Add", ["x", "table"], ["y"])], [tensor("x", FLOAT, [2, 3])], [tensor("y", FLOAT, [2, 3])],
            [const("table", [[1, 2, 3], [4, 5, 6]])])


@model
def bad_output_fixed():
    """total = the sum of all rows: the input has a batch, the output has always one row."""
    return ([node("ReduceSum", ["x"], ["total"], keepdims=1)],
            [tensor("x", FLOAT, ["batch", 4])], [tensor("total", FLOAT, [1, 1])], [])


@model
def bad_output_symbolic():
    """columns = the sum of all rows, column by column: its first dimension varies, but is not the batch."""
    nodes = [node("ReduceSum", ["x", "first"], ["columns"], keepdims=0)]
    return (nodes, [tensor("x", FLOAT, ["batch", "width"])], [tensor("columns", FLOAT, ["width"])],
            [const("first", [0], np.int64)])


@model
def bad_output_unnamed():
    """total = the sum of all rows, under a name for its first dimension as exporters make them up: it says nothing."""
    return ([node("ReduceSum", ["x"], ["total"], keepdims=1)],
            [tensor("x", FLOAT, ["batch", 4])], [tensor("total", FLOAT, ["ReduceSumtotal_dim_0", 1])], [])


@model
def coupled():
    """y = x minus the largest value of all rows: the shapes look like a batch, the rows depend on each other."""
    return ([node("ReduceMax", ["x"], ["largest"], keepdims=1), node("Sub", ["x", "largest"], ["y"])],
            [tensor("x", FLOAT, ["batch", 4])], [tensor("y", FLOAT, ["batch", 4])], [])


@model
def fails():
    """y = 10 * index for an index in 0..9; one above 9 fails while it runs, and the whole batch with it."""
    return ([node("Gather", ["table", "index"], ["y"])], [tensor("index", INT64, ["batch", 1])],
            [tensor("y", FLOAT, ["batch", 1])], [const("table", [10 * i for i in range(10)])])


@model
def batch_last():
    """y = 3x - 1, with a column for each row of the batch."""
    nodes = [node("Mul", ["x", "three"], ["triple"]), node("Sub", ["triple", "one"], ["y"])]
    return (nodes, [tensor("x", FLOAT, [4, "batch"])], [tensor("y", FLOAT, [4, "batch"])],
            [const("three", 3), const("one", 1)])


@model
def slow():
    """y = x, after 160 products of 256x256 matrices of zeros: some tens of milliseconds, whatever the batch."""
    body = helper.make_graph(
        [node("Identity", ["go_on"], ["still"]), node("MatMul", ["state", "state"], ["next"])], "body",
        [tensor("step", INT64, []), tensor("go_on", TensorProto.BOOL, []), tensor("state", FLOAT, [256, 256])],
        [tensor("still", TensorProto.BOOL, []), tensor("next", FLOAT, [256, 256])])
    nodes = [
        # The zeros come from the number of rows, so that nothing can be computed at load.
        node("Shape", ["x"], ["dims"]), node("Cast", ["dims"], ["sizes"], to=FLOAT),
        node("Mul", ["sizes", "zero"], ["nothing"]), node("ReduceMax", ["nothing"], ["scalar"], keepdims=0),
        node("Expand", ["scalar", "square"], ["start"]), node("Loop", ["steps", "", "start"], ["end"], body=body),
        node("ReduceMax", ["end"], ["rest"], keepdims=0), node("Add", ["x", "rest"], ["y"]),
    ]
    return (nodes, [tensor("x", FLOAT, ["batch", 1])], [tensor("y", FLOAT, ["batch", 1])],
            [const("zero", 0), const("square", [256, 256], np.int64), const("steps", 160, np.int64)])


def serialized(name):
    """The bytes of one model's file."""
    nodes, inputs, outputs, constants = MODELS[name]()
    graph = helper.make_graph(nodes, name, inputs, outputs, constants)
    built = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="concertina")
    checker.check_model(built, full_check=True)
    return built.SerializeToString(deterministic=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    check = parser.parse_args().check
    stale = []
    for name in MODELS:
        path, data = HERE / name / "1" / "model.onnx", serialized(name)
        if check:
            stale += [] if path.exists() and path.read_bytes() == data else [name]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    if stale:
        sys.exit(f"differ from what generate.py writes: {', '.join(stale)}")


if __name__ == "__main__":
    main()
