#!/usr/bin/env python3
"""Write costly/1/model.onnx again: y = 3x, after some tens of milliseconds whatever the batch, by way of tensors of 1 MiB a row.

So the largest batch is always the best one, and memory is what bounds it. Needs onnx, as tests/models/generate.py.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models"))

import generate  # noqa: E402


@generate.model
def costly():
    """y = 3x; see above."""
    slow, inputs, outputs, constants = generate.MODELS["slow"]()
    wide, _, _, more = generate.MODELS["wide"]()
    slow[-1].output[0] = "late"
    wide[0].input[0] = "late"
    for constant in more:
        constant.name = f"wide_{constant.name}"
    for one in wide:
        for place, name in enumerate(one.input):
            one.input[place] = f"wide_{name}" if name in ("shape", "two") else name
    return [*slow, *wide], inputs, outputs, [*constants, *more]


if __name__ == "__main__":
    path = HERE / "costly/1/model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(generate.serialized("costly"))
