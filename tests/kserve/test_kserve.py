"""KServe's own inference client, REST and gRPC, against the built server: the package as it is, nothing imitated."""
import asyncio
import json
import sys
import unittest
from pathlib import Path

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))
from harness import PATIENCE, ServerTestCase  # noqa: E402

ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8.5]], np.float32)


def request(rows=ROWS, binary=False, model="affine", name="x", datatype="FP32", **options):
    """A request for the model that answers 2x + 1."""
    entry = InferInput(name, list(rows.shape), datatype)
    entry.set_data_from_numpy(rows, binary_data=binary)
    return InferRequest(model, [entry], **options)


class Rest(ServerTestCase):
    """Open Inference Protocol and KServe's first protocol, by InferenceRESTClient."""

    def setUp(self):
        self.base = f"http://{self.server.url}"

    def run_client(self, work, protocol="v2"):
        async def run():
            client = InferenceRESTClient(RESTConfig(protocol=protocol, timeout=PATIENCE))
            try:
                return await work(client)
            finally:
                await client.close()
        return asyncio.run(run())

    def test_health(self):
        self.assertTrue(self.run_client(lambda client: client.is_server_live(self.base)))
        self.assertTrue(self.run_client(lambda client: client.is_server_ready(self.base)))
        self.assertTrue(self.run_client(lambda client: client.is_model_ready(self.base, "affine")))
        self.assertFalse(self.run_client(lambda client: client.is_model_ready(self.base, "nobody")))

    def test_infer_in_json_and_binary_and_both_ways_mixed(self):
        for binary in (False, True):
            for answered in (False, True):
                sent = request(binary=binary, request_id="r-1", parameters={"priority": 1},
                               request_outputs=[RequestedOutput("y", {"binary_data": answered})])
                answer = self.run_client(lambda client: client.infer(self.base, sent, model_name="affine"))
                self.assertEqual((answer.id, answer.model_name), ("r-1", "affine"))
                self.assert_same(answer.outputs[0].as_numpy(), 2 * ROWS + 1)

    def test_every_datatype_comes_back_as_it_went(self):
        metadata = self.client.get_model_metadata("datatypes")
        values = {"BOOL": np.array([[True], [False]]), "BYTES": np.array([[b"a"], [b"\xc3\xa9"]], object)}
        kinds = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64} | {
            sign + f"INT{bits}": np.dtype(f"{'u' if sign else ''}int{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
        inputs = []
        for entry in metadata["inputs"]:
            kind = entry["datatype"]
            if kind == "BF16":  # numpy has none, so its client has none: the bytes go by hand, and are compared with tritonclient.
                tensor = InferInput(entry["name"], [2, 1], "BF16")
                tensor._raw_data = np.array([0x3F80, 0x4000], np.uint16).tobytes()
                tensor.parameters = {"binary_data_size": 4}
            else:
                tensor = InferInput(entry["name"], [2, 1], kind)
                tensor.set_data_from_numpy(values.get(kind, np.array([[1], [2]], kinds.get(kind))), binary_data=True)
            inputs.append(tensor)
        wanted = [RequestedOutput(entry["name"], {"binary_data": True}) for entry in metadata["outputs"] if entry["datatype"] != "BF16"]
        answer = self.run_client(lambda client: client.infer(
            self.base, InferRequest("datatypes", inputs, request_outputs=wanted), model_name="datatypes"))
        for output in answer.outputs:
            kind = output.datatype
            # Its client makes text of BYTES.
            expected = np.array([["a"], ["é"]]) if kind == "BYTES" else values.get(kind, np.array([[1], [2]], kinds.get(kind)))
            self.assertEqual(output.as_numpy().tolist(), expected.tolist(), output.name)

    def test_errors_arrive_with_their_words(self):
        for bad, word in ((request(ROWS[:, :3]), "shape"), (request(name="z"), "z")):
            with self.assertRaises(httpx.HTTPStatusError) as caught:
                self.run_client(lambda client, bad=bad: client.infer(self.base, bad, model_name="affine"))
            self.assertEqual(caught.exception.response.status_code, 400)
            self.assertIn(word, json.loads(caught.exception.response.text)["error"])

    def test_its_first_protocol(self):
        self.assertTrue(self.run_client(lambda client: client.is_model_ready(self.base, "affine"), "v1"))
        answer = self.run_client(lambda client: client.infer(self.base, {"instances": ROWS.tolist()}, model_name="affine"), "v1")
        self.assertEqual(answer, {"predictions": (2 * ROWS + 1).tolist()})


class Grpc(ServerTestCase):
    """The same protocol by InferenceGRPCClient."""

    def run_client(self, work):
        async def run():
            client = InferenceGRPCClient(self.server.grpc_url, timeout=PATIENCE)
            try:
                return await work(client)
            finally:
                await client.close()
        return asyncio.run(run())

    def test_health(self):
        self.assertTrue(self.run_client(lambda client: client.is_server_live()))
        self.assertTrue(self.run_client(lambda client: client.is_server_ready()))
        self.assertTrue(self.run_client(lambda client: client.is_model_ready("affine")))

    def test_infer_typed_and_raw(self):
        for binary in (False, True):
            answer = self.run_client(lambda client, binary=binary: client.infer(request(binary=binary, request_id="r-2")))
            self.assertEqual((answer.id, answer.model_name), ("r-2", "affine"))
            self.assert_same(answer.outputs[0].as_numpy(), 2 * ROWS + 1)

    def test_errors_arrive_with_their_words(self):
        with self.assertRaises(Exception) as caught:
            self.run_client(lambda client: client.infer(request(name="z")))
        self.assertIn("z", str(caught.exception))
        self.assertIn("INVALID_ARGUMENT", str(caught.exception))

    def test_many_at_once_each_get_their_own(self):
        async def all_at_once(client):
            return await asyncio.gather(*(client.infer(request(ROWS + number, True)) for number in range(64)))
        for number, answer in enumerate(self.run_client(all_at_once)):
            self.assert_same(answer.outputs[0].as_numpy(), 2 * (ROWS + number) + 1)


if __name__ == "__main__":
    unittest.main()
