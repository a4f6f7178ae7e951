"""all-MiniLM-L6-v2 in plain numpy and double precision: written from the paper's formulas, not from the ONNX graph.

Slow and easy to read; what the served model is compared with.
"""
import json
import math
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def read_weights():
    """{name: array} from the safetensors file that setup fetched."""
    data = (ROOT / ".setup/minilm/model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + size]), memoryview(data)[8 + size:]
    weights = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            weights[name] = np.frombuffer(body[begin:end], "<f4").reshape(entry["shape"]).astype(np.float64)
    return weights


class MiniLm:
    """Six layers of twelve heads over 384 dimensions."""

    def __init__(self):
        self.weights = read_weights()
        config = json.loads((ROOT / "models/minilm/config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]

    def linear(self, name, x):
        """x Wᵀ + b"""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def normalise(self, name, x):
        """Layer normalisation over the last dimension."""
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + self.epsilon)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attend(self, name, x, mask):
        """Attention of each token to those that the mask lets through, head by head. x is [tokens, width]."""
        query, key, value = (self.linear(f"{name}.self.{part}", x) for part in ("query", "key", "value"))
        width = x.shape[1] // self.heads
        heads = []
        for columns in (slice(h * width, (h + 1) * width) for h in range(self.heads)):
            scores = query[:, columns] @ key[:, columns].T / math.sqrt(width)
            scores = np.where(mask[None, :] == 1, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ value[:, columns])
        return self.linear(f"{name}.output.dense", np.concatenate(heads, axis=1))

    def tokens(self, ids, mask, types):
        """The last hidden state of one text, [tokens, 384]; at least one token must be seen."""
        x = (self.weights["embeddings.word_embeddings.weight"][ids]
             + self.weights["embeddings.position_embeddings.weight"][:len(ids)]
             + self.weights["embeddings.token_type_embeddings.weight"][types])
        x = self.normalise("embeddings.LayerNorm", x)
        for number in range(self.layers):
            layer = f"encoder.layer.{number}"
            x = self.normalise(f"{layer}.attention.output.LayerNorm", x + self.attend(f"{layer}.attention", x, mask))
            inner = self.linear(f"{layer}.intermediate.dense", x)
            gelu = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
            x = self.normalise(f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", gelu))
        return x

    def embed(self, ids, mask, types):
        """The sentence embedding of one text, [384]: the mean of the tokens that are seen, at unit length."""
        mean = self.tokens(ids, mask, types)[mask == 1].mean(axis=0)
        return mean / np.linalg.norm(mean)
