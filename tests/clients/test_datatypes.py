"""Every datatype of the protocol goes in and comes out unchanged, in the binary form and in JSON."""
import json

import ml_dtypes
import numpy as np
import tritonclient.http as http_client
from harness import ServerTestCase

INTEGERS = {f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
FLOATS = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
TEXTS = [b"", "grüße, 世界 🪗".encode(), b"plain", b'"quoted"\n', b"\x00", "é".encode() * 300]


def columns(rows=2, width=3):
    """One array a datatype: the extremes of each type first, then small numbers; [rows, width]."""
    def fill(values, dtype):
        return np.resize(np.array(values, dtype=dtype), (rows, width))

    arrays = {"bool": fill([True, False, False], bool), "bytes": fill(TEXTS, object)}
    for name, dtype in INTEGERS.items():
        arrays[name] = fill([np.iinfo(dtype).min, np.iinfo(dtype).max, 7, 0, 1, 2], dtype)
    for name, dtype in (FLOATS | HALVES).items():
        limits = ml_dtypes.finfo(dtype)
        arrays[name] = fill([limits.max, limits.smallest_subnormal, -0.0, limits.min, 0.1, 1.5], dtype)
    return arrays


class Datatypes(ServerTestCase):
    def check(self, arrays, binary):
        inputs = {f"in_{name}": array for name, array in arrays.items()}
        forms = {name: binary or name == "in_bf16" for name in inputs}  # The client sends no BF16 as JSON.
        outputs = self.infer("datatypes", inputs, forms, outputs=None if binary else json_outputs(arrays))
        self.assertEqual(len(outputs), len(arrays))
        for name, array in arrays.items():
            with self.subTest(datatype=name, binary=binary):
                self.assert_same(outputs[f"out_{name}"], array)
                if name in FLOATS | HALVES:
                    np.testing.assert_array_equal(np.signbit(outputs[f"out_{name}"]), np.signbit(array))

    def test_values_are_unchanged(self):
        for binary in (True, False):
            self.check(columns(), binary)
            self.check(columns(rows=7, width=6), binary)

    def test_tensors_without_elements(self):
        for binary in (True, False):
            self.check(columns(rows=2, width=0), binary)

    def test_nan_and_infinity(self):
        for binary in (True, False):
            arrays = columns()
            for name in FLOATS:
                arrays[name][:] = [[np.nan, np.inf, -np.inf], [1, -np.inf, np.nan]]
            self.check(arrays, binary)

    def test_strings_that_are_no_text(self):
        arrays = columns()
        arrays["bytes"][:] = [[b"\xff\xfe", b"\x80", b""], [b"\xf0\x28", b"ok", b"\xc3"]]
        self.check(arrays, True)
        inputs = {f"in_{name}": array for name, array in arrays.items()}
        self.assert_refused(400, ["binary"], self.infer, "datatypes", inputs, outputs=json_outputs(["bytes"]))

    def test_half_precision_as_json_numbers(self):
        body = {"inputs": [entry(name, array) for name, array in columns(rows=1).items()],
                "outputs": [{"name": "out_fp16"}, {"name": "out_bf16"}]}
        for item in body["inputs"]:
            if item["name"] in ("in_fp16", "in_bf16"):
                item["data"] = [1.5, -2, 0.25]
        status, _, answer = self.server.request("POST", "/v2/models/datatypes/infer", json.dumps(body))
        self.assertEqual(status, 200, answer)
        for output in json.loads(answer)["outputs"]:
            self.assertEqual([float(value) for value in output["data"]], [1.5, -2, 0.25])

    def test_booleans_are_not_numbers(self):
        arrays = columns(rows=1)
        body = {"inputs": [entry(name, array) for name, array in arrays.items()]}
        next(item for item in body["inputs"] if item["name"] == "in_bool")["data"] = [0, 1, 1]
        status, _, answer = self.server.request("POST", "/v2/models/datatypes/infer", json.dumps(body))
        self.assertEqual(status, 400, answer)
        self.assertIn("in_bool", json.loads(answer)["error"])


def json_outputs(names):
    """The outputs of these datatypes, as JSON."""
    return [http_client.InferRequestedOutput(f"out_{name}", binary_data=False) for name in names]


def entry(name, array):
    """One input of a request in JSON."""
    data = [value.decode() if isinstance(value, bytes) else value for value in array.flatten().tolist()]
    return {"name": f"in_{name}", "shape": list(array.shape), "datatype": name.upper(), "data": data}
