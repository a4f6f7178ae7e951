"""TensorFlow Serving's REST interface, asked as its documentation does, by plain requests."""
import base64
import json

import numpy as np
from harness import DEMO_MODELS, ServerTestCase, in_threads
from test_demo_models import TEXTS, encode


class Predict(ServerTestCase):
    def post(self, path, body, expected=200):
        status, headers, answer = self.server.request("POST", path, json.dumps(body))
        self.assertEqual((status, headers["content-type"]), (expected, "application/json"), answer)
        return json.loads(answer)

    def get(self, path, expected=200):
        status, _, answer = self.server.request("GET", path)
        self.assertEqual(status, expected, answer)
        return json.loads(answer)

    def test_rows(self):
        rows = [[1, 2, 3, 4], [5.5, 6, 7, 8]]
        expected = (2 * np.array(rows) + 1).tolist()
        for path in ("/v1/models/affine:predict", "/v1/models/affine/versions/1:predict"):
            self.assertEqual(self.post(path, {"instances": rows}), {"predictions": expected})
            self.assertEqual(self.post(path, {"signature_name": "serving_default", "instances": [{"x": row} for row in rows]}),
                             {"predictions": expected})

    def test_columns(self):
        for inputs in ([[1, 2, 3, 4]], {"x": [[1, 2, 3, 4]]}):
            self.assertEqual(self.post("/v1/models/affine:predict", {"inputs": inputs}), {"outputs": [[3, 5, 7, 9]]})

    def test_several_inputs_and_outputs(self):
        rows = [{"ids": [3, 5], "mask": [1, 1]}, {"ids": [4, 0], "mask": [1, 0]}]
        self.assertEqual(self.post("/v1/models/varlen:predict", {"instances": rows}),
                         {"predictions": [{"doubled": [6, 10], "mean": [4]}, {"doubled": [8, 0], "mean": [4]}]})
        columns = {"ids": [[3, 5]], "mask": [[1, 1]]}
        self.assertEqual(self.post("/v1/models/varlen:predict", {"inputs": columns}),
                         {"outputs": {"doubled": [[6, 10]], "mean": [[4]]}})

    def test_bytes_in_base64(self):
        """All datatypes at once, one of them bytes that are no text."""
        names = [entry["name"] for entry in self.client.get_model_metadata("datatypes")["inputs"]]
        row = {name: [1, 0] for name in names} | {"in_bool": [True, False]}
        row["in_bytes"] = [{"b64": base64.b64encode(b"\xff\x00").decode()}, "text"]
        [answer] = self.post("/v1/models/datatypes:predict", {"instances": [row]})["predictions"]
        row["in_bytes"][1] = {"b64": base64.b64encode(b"text").decode()}  # An output whose name ends in _bytes is always so.
        self.assertEqual(answer, {name.replace("in_", "out_"): value for name, value in row.items()})

    def test_errors_have_their_own_form(self):
        for path, body, status, word in (
            ("/v1/models/nobody:predict", {"instances": [[1]]}, 404, "nobody"),
            ("/v1/models/affine/versions/9:predict", {"instances": [[1]]}, 404, "version 9"),
            ("/v1/models/affine:predict", {}, 400, "instances"),
            ("/v1/models/affine:predict", {"instances": [[1]], "inputs": [[1]]}, 400, "either"),
            ("/v1/models/affine:predict", {"instances": [[1, 2, 3]]}, 400, "shape"),
            ("/v1/models/affine:predict", {"instances": [[1, 2, 3, "4"]]}, 400, "instances[0]"),
            ("/v1/models/fails:predict", {"instances": [[99]]}, 500, "failed"),
            ("/v1/models/affine:classify", {"examples": []}, 501, "predict"),
        ):
            with self.subTest(path=path, body=body):
                self.assertIn(word, self.post(path, body, status)["error"])

    def test_status_and_metadata(self):
        available = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        for path in ("/v1/models/affine", "/v1/models/affine/versions/1"):
            self.assertEqual(self.get(path)["model_version_status"], [available])
        self.assertEqual(self.get("/v1/models/affine/metadata")["model_spec"]["name"], "affine")
        self.assertIn("affine", self.get("/v1/models")["models"])
        self.assertIn("nobody", self.get("/v1/models/nobody", 404)["error"])

    def test_requests_of_both_protocols_share_batches(self):
        def work(number):
            if number % 2:
                return self.post("/v1/models/affine:predict", {"instances": [[number] * 4]})["predictions"][0][0]
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [number] * 4}]}
            return self.post("/v2/models/affine/infer", body)["outputs"][0]["data"][0]

        self.assertEqual(in_threads(16, work), [2 * number + 1 for number in range(16)])


class Embeddings(ServerTestCase):
    MODELS = DEMO_MODELS

    def test_a_transformer_answers_both_protocols_alike(self):
        row = {name: array[0].tolist() for name, array in encode(TEXTS[0], 16).items()}
        status, _, answer = self.server.request("POST", "/v1/models/minilm:predict", json.dumps({"instances": [row]}))
        self.assertEqual(status, 200, answer)
        [prediction] = json.loads(answer)["predictions"]
        expected = self.infer("minilm", encode(TEXTS[0], 16))["sentence_embedding"][0]
        np.testing.assert_allclose(np.array(prediction["sentence_embedding"], dtype=np.float32), expected, rtol=0, atol=1e-6)
