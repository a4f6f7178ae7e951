"""How a file becomes magika's 2048 input values; models/README.md says the same in words."""
import numpy as np

PART, BLOCK, PADDING = 1024, 4096, 256


def features(data):
    """INT32 [2048] of a file's content: 1024 values of its beginning, 1024 of its end, whitespace around it ignored."""
    begin = data[:BLOCK].lstrip()[:PART]
    end = data[-BLOCK:].rstrip()[-PART:]
    padding = [PADDING] * PART
    return np.array([*begin, *padding[len(begin):], *padding[len(end):], *end], dtype=np.int32)
