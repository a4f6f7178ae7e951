#!/usr/bin/env python3
"""Write models/minilm/1/model.onnx: all-MiniLM-L6-v2, a BERT sentence encoder, from its weights and without torch.

Inputs INT64 [batch, sequence]: `input_ids`, `attention_mask`, `token_type_ids`. Outputs FP32: `last_hidden_state`
[batch, sequence, 384], and `sentence_embedding` [batch, 384], the mean over the tokens that the mask lets through,
scaled to unit length.

Each layer is written in the nodes that ONNX Runtime knows how to fuse (Attention, SkipLayerNormalization, BiasGelu).
tests/clients/reference_minilm.py is the same model in plain numpy; a test compares the two.
"""
import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
FLOAT, INT64 = np.float32, np.int64


def load_safetensors(path):
    """The tensors of a safetensors file: a header's length in 8 bytes, the header in JSON, then the data."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    types = {"F32": FLOAT, "I64": INT64}
    return {
        name: np.frombuffer(data[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]],
                            types[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


class Graph:
    """Nodes, constants and shapes as they are added; values are known by their names."""

    def __init__(self):
        self.nodes, self.constants, self.shapes = [], {}, []

    def constant(self, name, value, dtype=FLOAT):
        """A constant, stored once however often it is asked for."""
        self.constants.setdefault(name, numpy_helper.from_array(np.array(value, dtype=dtype, order="C"), name))
        return name

    def op(self, kind, *inputs, out=None, **attributes):
        """A node with one output, whose name is returned."""
        number = len(self.nodes)
        out = out or f"{kind.lower()}_{number}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=f"{kind}_{number}", **attributes))
        return out


class Bert:
    """Adds the parts of the encoder to a graph."""

    def __init__(self, config, weights):
        assert config["hidden_act"] == "gelu" and config.get("position_embedding_type", "absolute") == "absolute"
        self.config, self.weights, self.graph = config, weights, Graph()
        self.hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.axes = [self.graph.constant(f"axis_{axis}", [axis], INT64) for axis in range(3)]

    def weight(self, name):
        return self.graph.constant(name, self.weights[name])

    def norm(self, x, name):
        epsilon = float(self.config["layer_norm_eps"])
        return self.graph.op("LayerNormalization", x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"),
                             axis=-1, epsilon=epsilon)

    def dense(self, x, name):
        # Stored as [out, in]; MatMul wants [in, out].
        matrix = self.graph.constant(f"{name}.weight_t", self.weights[f"{name}.weight"].T)
        return self.graph.op("Add", self.graph.op("MatMul", x, matrix), self.weight(f"{name}.bias"))

    def embeddings(self):
        """Word, type and position embeddings, added and normalised."""
        op = self.graph.op
        words = op("Gather", self.weight("embeddings.word_embeddings.weight"), "input_ids")
        types = op("Gather", self.weight("embeddings.token_type_embeddings.weight"), "token_type_ids")
        length = op("Gather", op("Shape", "input_ids"), self.graph.constant("index_1", 1, INT64), axis=0)
        length = op("Unsqueeze", length, self.axes[0])
        table = self.weight("embeddings.position_embeddings.weight")
        places = op("Unsqueeze", op("Slice", table, self.axes[0], length, self.axes[0]), self.axes[0])
        x = op("Add", op("Add", words, types), places)
        # Shape inference cannot see that the slice is as long as the input; the fusions need to know.
        self.graph.shapes += [value_info(places, TensorProto.FLOAT, [1, "sequence", self.hidden]),
                              value_info(x, TensorProto.FLOAT, ["batch", "sequence", self.hidden])]
        return self.norm(x, "embeddings.LayerNorm")

    def mask_bias(self):
        """[batch, 1, 1, sequence], added to the scores: 0 where seen, a large negative number where padded."""
        op, constant = self.graph.op, self.graph.constant
        mask = op("Unsqueeze", op("Unsqueeze", "attention_mask", self.axes[1]), self.axes[2])
        hidden = op("Sub", constant("one", 1.0), op("Cast", mask, to=TensorProto.FLOAT))
        return op("Mul", hidden, constant("minus_ten_thousand", -10000.0))

    def layer(self, x, bias, number):
        """Self-attention and the feed-forward part, each added to its input and normalised."""
        op, constant = self.graph.op, self.graph.constant
        name, head = f"encoder.layer.{number}", self.hidden // self.heads

        def heads_of(part, perm):
            split = constant("split_heads", [0, 0, self.heads, head], INT64)
            return op("Transpose", op("Reshape", self.dense(x, f"{name}.attention.self.{part}"), split), perm=perm)

        query, key = heads_of("query", [0, 2, 1, 3]), heads_of("key", [0, 2, 3, 1])
        value = heads_of("value", [0, 2, 1, 3])
        scores = op("Div", op("MatMul", query, key), constant("sqrt_head", math.sqrt(head)))
        weights = op("Softmax", op("Add", scores, bias), axis=3)
        context = op("Transpose", op("MatMul", weights, value), perm=[0, 2, 1, 3])
        context = op("Reshape", context, constant("merge_heads", [0, 0, self.hidden], INT64))
        attended = self.dense(context, f"{name}.attention.output.dense")
        x = self.norm(op("Add", attended, x), f"{name}.attention.output.LayerNorm")

        inner = self.dense(x, f"{name}.intermediate.dense")
        erf = op("Erf", op("Div", inner, constant("sqrt_2", math.sqrt(2.0))))
        gelu = op("Mul", op("Mul", inner, op("Add", erf, constant("one", 1.0))), constant("half", 0.5))
        return self.norm(op("Add", self.dense(gelu, f"{name}.output.dense"), x), f"{name}.output.LayerNorm")

    def sentence(self, x):
        """The masked mean over tokens, scaled to unit length; safe for a row whose mask is all zero."""
        op, constant = self.graph.op, self.graph.constant
        mask = op("Unsqueeze", op("Cast", "attention_mask", to=TensorProto.FLOAT), self.axes[2])
        total = op("ReduceSum", op("Mul", x, mask), self.axes[1], keepdims=0)
        count = op("Max", op("ReduceSum", mask, self.axes[1], keepdims=0), constant("tiny_count", 1e-9))
        mean = op("Div", total, count)
        length = op("Max", op("ReduceL2", mean, axes=[1], keepdims=1), constant("tiny_length", 1e-12))
        op("Div", mean, length, out="sentence_embedding")

    def model(self):
        """The whole encoder as a checked ONNX model."""
        x, bias = self.embeddings(), self.mask_bias()
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(x, bias, number)
        self.graph.op("Identity", x, out="last_hidden_state")
        self.sentence(x)
        graph = helper.make_graph(
            self.graph.nodes, "minilm",
            [value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in INPUTS],
            [value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", self.hidden]),
             value_info("sentence_embedding", TensorProto.FLOAT, ["batch", self.hidden])],
            list(self.graph.constants.values()), value_info=self.graph.shapes)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8,
                                  producer_name="concertina")
        checker.check_model(model, full_check=True)
        return model


value_info = helper.make_tensor_value_info


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=ROOT / ".setup/minilm/model.safetensors")
    parser.add_argument("--config", type=Path, default=ROOT / "models/minilm/config.json")
    parser.add_argument("--out", type=Path, default=ROOT / "models/minilm/1/model.onnx")
    options = parser.parse_args()
    weights = {name.removeprefix("bert."): value for name, value in load_safetensors(options.weights).items()}
    model = Bert(json.loads(options.config.read_text()), weights).model()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_suffix(".part")
    part.write_bytes(model.SerializeToString(deterministic=True))
    os.replace(part, options.out)
    print(f"setup: wrote {options.out.relative_to(ROOT) if options.out.is_relative_to(ROOT) else options.out}, "
          f"{options.out.stat().st_size / 1e6:.0f} MB, {len(model.graph.node)} nodes", flush=True)


if __name__ == "__main__":
    main()
