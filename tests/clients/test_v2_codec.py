"""The Open Inference Protocol as KServe's and MLServer's clients put it on the wire, by hand: the package of KServe brings
sixty others. What they send beside the tensors, and what they read of the answers, is what these tests send and read."""
import http.client
import json

import numpy as np
from harness import PATIENCE, ServerTestCase

ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.float32)


class KServe(ServerTestCase):
    """Its client decodes every answer as JSON, and drops the text of an error whose content type has a parameter."""

    def get(self, path, expected=200):
        status, headers, body = self.server.request("GET", path, headers={"Accept": "*/*", "Accept-Encoding": "gzip, deflate"})
        self.assertEqual((status, headers["content-type"], headers["content-encoding"]), (expected, "application/json", None))
        return json.loads(body)

    def infer(self, body, tail=b"", expected=200):
        text = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if tail:
            headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
        status, headers, answer = self.server.request("POST", "/v2/models/affine/infer", text + tail, headers)
        self.assertEqual(status, expected, answer)
        return headers, answer

    def test_health(self):
        self.assertIs(self.get("/v2/health/live")["live"], True)
        self.assertIs(self.get("/v2/health/ready")["ready"], True)
        self.assertEqual(self.get("/v2/models/affine/ready"), {"name": "affine", "ready": True})
        self.assertIn("affine", self.get("/v2/models")["models"])

    def test_json(self):
        """It names the model in the body too, always sends an id, and null or empty where it has nothing to say."""
        _, answer = self.infer({
            "id": "4be4e82f", "model_name": "affine", "parameters": {}, "outputs": None, "inputs": [
                {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {}, "data": ROWS.flatten().tolist()}]})
        answer = json.loads(answer)
        self.assertEqual((answer["id"], answer["model_name"], answer["model_version"]), ("4be4e82f", "affine", "1"))
        [output] = answer["outputs"]
        self.assertEqual((output["name"], output["datatype"], output["shape"]), ("y", "FP32", [2, 4]))
        self.assertEqual(output["data"], (2 * ROWS + 1).flatten().tolist())

    def test_binary(self):
        headers, answer = self.infer({
            "id": "5", "model_name": "affine", "parameters": {"binary_data_output": True}, "inputs": [
                {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": ROWS.nbytes}}]},
            ROWS.tobytes())
        length = int(headers["Inference-Header-Content-Length"])
        [output] = json.loads(answer[:length])["outputs"]
        self.assertEqual(output["parameters"], {"binary_data_size": ROWS.nbytes})
        np.testing.assert_array_equal(np.frombuffer(answer[length:], np.float32).reshape(2, 4), 2 * ROWS + 1)

    def test_errors(self):
        headers, answer = self.infer({"model_name": "affine", "inputs": []}, expected=400)
        self.assertEqual(headers["content-type"], "application/json")
        self.assertIn("'x'", json.loads(answer)["error"])

    def test_its_first_protocol(self):
        self.assertEqual(self.get("/"), {"status": "alive"})
        model = self.get("/v1/models/affine")
        self.assertEqual((model["name"], model["ready"]), ("affine", True))
        status, _, answer = self.server.request("POST", "/v1/models/affine:predict", json.dumps({"instances": ROWS.tolist()}))
        self.assertEqual((status, json.loads(answer)), (200, {"predictions": (2 * ROWS + 1).tolist()}))


class MLServer(ServerTestCase):
    """Its codecs put `content_type` beside every tensor and an object of headers into the parameters."""

    def infer(self, body, headers=None):
        headers = {"Content-Type": "application/json", "seldon-puid": "1", "x-request-id": "puid-7"} | (headers or {})
        return self.server.request("POST", "/v2/models/datatypes/infer", body, headers)

    def test_numbers_and_texts_with_content_types(self):
        metadata = self.client.get_model_metadata("datatypes")
        values = {"BOOL": [True, False], "BYTES": ["a", "b"]}
        inputs = [{"name": entry["name"], "datatype": entry["datatype"], "shape": [2, 1],
                   "data": values.get(entry["datatype"], [1, 2]),
                   "parameters": {"content_type": "str" if entry["datatype"] == "BYTES" else "np", "headers": {"a": ["b"]}}}
                  for entry in metadata["inputs"]]
        body = {"parameters": {"content_type": "pd", "headers": {"x": "y"}}, "inputs": inputs,
                "outputs": [{"name": "out_int64", "parameters": {"content_type": "np"}}, {"name": "out_bytes"}]}
        status, headers, answer = self.infer(json.dumps(body))
        self.assertEqual((status, headers["x-request-id"]), (200, "puid-7"), answer)
        outputs = {output["name"]: output for output in json.loads(answer)["outputs"]}
        self.assertEqual(outputs["out_int64"]["data"], [1, 2])
        self.assertEqual(outputs["out_bytes"]["data"], ["a", "b"])

    def test_its_command_line_client_calls_binary_bodies_json(self):
        body = json.dumps({"id": "", "inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32",
                                                 "parameters": {"binary_data_size": ROWS.nbytes}}],
                           "outputs": [{"name": "y", "parameters": {"binary_data": False}}]}).encode()
        headers = {"Content-Type": "application/json", "Inference-Header-Content-Length": str(len(body))}
        status, _, answer = self.server.request("POST", "/v2/models/affine/infer", body + ROWS.tobytes(), headers)
        self.assertEqual((status, json.loads(answer)["outputs"][0]["data"]), (200, (2 * ROWS + 1).flatten().tolist()))

    def test_the_index_with_and_without_a_body(self):
        for body in (None, "", "{}", '{"ready": true}'):
            status, _, answer = self.server.request("POST", "/v2/repository/index", body)
            self.assertEqual(status, 200)
            for entry in json.loads(answer):
                self.assertEqual(set(entry), {"name", "version", "state", "reason"})


class Curl(ServerTestCase):
    """What curl does by itself: a large body waits for a word, a stream comes in chunks, one connection serves all."""

    def test_a_large_body_and_a_chunked_one_over_one_connection(self):
        body = json.dumps({"inputs": [{"name": "x", "shape": [500, 4], "datatype": "FP32", "data": [1.5] * 2000}]}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        self.addCleanup(connection.close)
        for _ in range(2):
            connection.putrequest("POST", "/v2/models/affine/infer")
            connection.putheader("Expect", "100-continue")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            self.assertTrue(connection.sock.recv(64).startswith(b"HTTP/1.1 100 "))
            connection.send(body)
            response = connection.getresponse()
            self.assertEqual((response.status, len(json.loads(response.read())["outputs"][0]["data"])), (200, 2000))
            pieces = (body[start:start + 1000] for start in range(0, len(body), 1000))
            connection.request("POST", "/v2/models/affine/infer", pieces, encode_chunked=True,
                               headers={"Transfer-Encoding": "chunked"})
            response = connection.getresponse()
            self.assertEqual((response.status, len(json.loads(response.read())["outputs"][0]["data"])), (200, 2000))
