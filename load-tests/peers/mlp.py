#!/usr/bin/env python3
"""Two models of dense layers with seeded weights: `mlp`, tens of microseconds a row, and `mlp_big`, bound by reading 86 MB."""
import pathlib
import sys

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save


def mlp(width, depth):
    random, nodes, weights, last = np.random.default_rng(3), [], [], "x"
    sizes = [256, *[width] * depth, 16]
    for layer, (rows, columns) in enumerate(zip(sizes, sizes[1:])):
        values = {f"w{layer}": random.standard_normal((rows, columns)) / rows**0.5, f"b{layer}": np.zeros(columns)}
        weights += [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
        final = layer == depth
        nodes.append(helper.make_node("Gemm", [last, f"w{layer}", f"b{layer}"], ["y" if final else f"g{layer}"]))
        if not final:
            nodes.append(helper.make_node("Relu", [f"g{layer}"], [f"h{layer}"]))
        last = f"h{layer}"
    tensor = lambda name, size: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
    graph = helper.make_graph(nodes, "mlp", [tensor("x", 256)], [tensor("y", 16)], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


for name, width, depth in [("mlp", 256, 3), ("mlp_big", 2048, 6)]:
    folder = pathlib.Path(sys.argv[1]) / name
    folder.mkdir(parents=True, exist_ok=True)
    save(mlp(width, depth), folder / "model.onnx")
