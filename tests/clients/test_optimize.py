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


def optimize(model, *flags):
    """The exit code and what was said."""
    command = [binary(), "optimize", model, "--models", str(DEMO_MODELS), "--cache", "", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE,
                          env=dict(os.environ, CONCERTINA_LOG_LEVEL="error"))
    return done.returncode, done.stdout + done.stderr


class OptimizeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.target = Path(folder.name) / "model.onnx"

    def test_each_attention_is_one_operator_and_the_answers_are_those_of_the_reference(self):
        code, said = optimize("minilm", "--out", str(self.target))
        self.assertEqual(code, 0, said)
        self.assertIn("6 of 6 attentions are one operator now", said)
        ops = [node.op_type for node in onnx.load(self.target).graph.node]
        self.assertEqual((ops.count("MultiHeadAttention"), ops.count("Softmax")), (6, 0))
        self.assertEqual([file.name for file in self.target.parent.iterdir()], ["model.onnx"])
        session = onnxruntime.InferenceSession(self.target, providers=["CPUExecutionProvider"])
        alone = [encode(text) for text in TEXTS]
        longest = max(text["input_ids"].shape[1] for text in alone)
        # Padded to the longest, so that masks count.
        found = session.run(["last_hidden_state"], stack([encode(text, longest) for text in TEXTS]))[0]
        reference = MiniLm()
        for text, row in zip(alone, found):
            expected = reference.tokens(*(array[0] for array in text.values()))
            np.testing.assert_allclose(row[:len(expected)], expected, atol=1e-4)

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
