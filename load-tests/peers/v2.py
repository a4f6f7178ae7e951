"""What the peers share: one ONNX Runtime session, and the Open Inference Protocol's JSON.

Peers without routes of their own for the protocol take and give the same JSON, so that one body serves all. Settings come
from the environment, which start.py fills.
"""
import os

import numpy as np
import onnxruntime

THREADS = int(os.environ.get("THREADS", "1"))
INSTANCES = int(os.environ.get("INSTANCES", "1"))
MAX_BATCH = int(os.environ.get("MAX_BATCH", "64"))
DELAY_SECONDS = float(os.environ.get("DELAY_SECONDS", "0.001"))
# The one output that is asked for.
OUTPUT = os.environ["OUTPUT"]
PORT = int(os.environ.get("PORT", "0"))

FROM_WIRE = {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}
TO_WIRE = {np.dtype(kind): name for name, kind in FROM_WIRE.items()}


def load():
    """A session as lean as ours: no threads that spin while there is nothing to do."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])


def decode(body):
    return {entry["name"]: np.array(entry["data"], FROM_WIRE[entry["datatype"]]).reshape(entry["shape"])
            for entry in body["inputs"]}


def encode(arrays):
    return {"outputs": [{"name": name, "datatype": TO_WIRE[array.dtype], "shape": list(array.shape),
                         "data": array.ravel().tolist()} for name, array in arrays.items()]}


def run_batch(session, requests):
    """One run for all requests, which have rows of one shape; their outputs in order."""
    names = [OUTPUT]
    first = requests[0]
    joined = first if len(requests) == 1 else {name: np.concatenate([request[name] for request in requests]) for name in first}
    results = session.run(names, joined)
    answers, begin = [], 0
    for request in requests:
        end = begin + len(next(iter(request.values())))
        answers.append({name: result[begin:end] for name, result in zip(names, results)})
        begin = end
    return answers
