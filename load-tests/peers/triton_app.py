"""Triton's Python backend; its dynamic batcher hands over whole batches of requests."""
import json
import os
import sys

sys.path[:0] = [os.environ["PEER_PACKAGES"], os.environ["PEER_FOLDER"]]

import numpy as np
import triton_python_backend_utils as triton

import v2


class TritonPythonModel:
    def initialize(self, args):
        self.session = v2.load()
        self.inputs = [entry["name"] for entry in json.loads(args["model_config"])["input"]]

    def execute(self, requests):
        bodies = [{name: triton.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs} for request in requests]
        return [triton.InferenceResponse([triton.Tensor(name, np.ascontiguousarray(array)) for name, array in answer.items()])
                for answer in v2.run_batch(self.session, bodies)]
