"""`concertina optimize`: what it writes answers as the reference does, and what it does not write it says."""
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from harness import DEMO_MODELS, PATIENCE, binary
from reference_minilm import MiniLm
from test_demo_models import TEXTS, encode, stack


def optimize(model, *flags, models=DEMO_MODELS):
    """The exit code and what was said."""
    # How fast either form is matters to nobody here.
    quick = ["--set", "model.warmup.seconds=0.1", "--set", "model.instances=1"]
    command = [binary(), "optimize", model, "--models", str(models), "--cache", "", *quick, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE,
                          env=dict(os.environ, CONCERTINA_LOG_LEVEL="error"))
    return done.returncode, done.stdout + done.stderr


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def attention(noise):
    """A model that is one attention of two heads of four, with so much noise in its answers, other in each run."""
    make = onnx.helper.make_node
    constant = onnx.numpy_helper.from_array
    weights = np.random.RandomState(3).rand(8, 8).astype(np.float32)
    nodes = []
    for name, perm in ("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]):
        nodes += [make("MatMul", ["x", "weights"], [name]), make("Reshape", [name, "heads"], [name + "4"]),
                  make("Transpose", [name + "4"], [name + "h"], perm=perm)]
    nodes += [make("MatMul", ["qh", "kh"], ["products"]), make("Mul", ["products", "half"], ["scores"]),
              make("Softmax", ["scores"], ["parts"], axis=-1), make("MatMul", ["parts", "vh"], ["mixed"]),
              make("Transpose", ["mixed"], ["merged"], perm=[0, 2, 1, 3]), make("Reshape", ["merged", "back"], ["attended"]),
              make("RandomNormalLike", ["attended"], ["noise"], scale=noise), make("Add", ["attended", "noise"], ["y"])]
    end = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 16, 8]) for name in "xy"]
    constants = [constant(weights, "weights"), constant(np.array([0, 0, 2, 4]), "heads"), constant(np.array([0, 0, 8]), "back"),
                 constant(np.float32(0.5), "half")]
    graph = onnx.helper.make_graph(nodes, "attention", end[:1], end[1:], constants)
    return onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])


class OptimizeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.target = Path(folder.name) / "model.onnx"

    def test_each_attention_is_one_operator_and_the_answers_are_those_of_the_reference(self):
        code, said = optimize("minilm", "--out", str(self.target))
        self.assertEqual(code, 0, said)
        self.assertIn("6 of 6 softmaxes were attention", said)
        ops = [node.op_type for node in onnx.load(self.target).graph.node]
        self.assertEqual((ops.count("MultiHeadAttention"), ops.count("Softmax")), (6, 0))
        self.assertEqual([file.name for file in self.target.parent.iterdir()], ["model.onnx"])
        self.assertEqual(self.target.stat().st_mode & 0o777, 0o666 & ~umask(), "whoever serves it can read it")
        session = onnxruntime.InferenceSession(self.target, providers=["CPUExecutionProvider"])
        alone = [encode(text) for text in TEXTS]
        longest = max(text["input_ids"].shape[1] for text in alone)
        # Padded to the longest, so that masks count.
        found = session.run(["last_hidden_state"], stack([encode(text, longest) for text in TEXTS]))[0]
        reference = MiniLm()
        for text, row in zip(alone, found):
            expected = reference.tokens(*(array[0] for array in text.values()))
            np.testing.assert_allclose(row[:len(expected)], expected, atol=1e-4)

    def test_nothing_is_written_that_answers_otherwise(self):
        models, out = self.target.with_name("models"), self.target.with_name("out")
        out.mkdir()
        for noise, expected in (1e-30, 0), (1.0, 1):
            folder = models / f"noise{expected}" / "1"
            folder.mkdir(parents=True)
            onnx.save(attention(noise), folder / "model.onnx")
            code, said = optimize(f"noise{expected}", "--out", str(out / f"{expected}.onnx"), models=models)
            self.assertEqual(code, expected, said)
        self.assertIn("nothing is written: answers differ by", said)
        self.assertEqual([file.name for file in out.iterdir()], ["0.onnx"], "not even a draft")

    def test_nothing_is_written_over_a_file_or_where_there_is_no_attention(self):
        self.target.write_text("mine")
        code, said = optimize("minilm", "--out", str(self.target))
        self.assertEqual((code, self.target.read_text()), (1, "mine"), said)
        self.assertIn("is there already", said)
        other = self.target.with_name("other.onnx")
        code, said = optimize("magika", "--out", str(other))
        self.assertEqual((code, other.exists()), (1, False), said)
        self.assertIn("no attention was found", said)
        code, said = optimize("minilm", "--out", str(other), "--tolerance", "2")
        self.assertEqual((code, other.exists()), (2, False), said)


if __name__ == "__main__":
    unittest.main()
