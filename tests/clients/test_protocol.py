"""The Open Inference Protocol as tritonclient speaks it: health, metadata, infer, and refusals that can be read."""
import asyncio
import json

import numpy as np
import tritonclient.http as http_client
import tritonclient.http.aio as aio_client
from harness import PATIENCE, ServerTestCase, as_inputs, as_outputs
from tritonclient.utils import InferenceServerException

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def requested(**forms):
    """Outputs by name, each in the binary form or not."""
    return [http_client.InferRequestedOutput(name, binary_data=binary) for name, binary in forms.items()]


class Health(ServerTestCase):
    def test_is_live_and_ready(self):
        self.assertTrue(self.client.is_server_live())
        self.assertTrue(self.client.is_server_ready())
        self.assertTrue(self.client.is_model_ready("affine"))
        self.assertTrue(self.client.is_model_ready("affine", "1"))
        self.assertFalse(self.client.is_model_ready("nobody"))

    def test_health_has_json_bodies(self):
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/affine/ready"):
            status, headers, body = self.server.request("GET", path)
            self.assertEqual((status, headers["content-type"]), (200, "application/json"), path)
            self.assertTrue(json.loads(body), path)

    def test_server_metadata_names_extensions(self):
        metadata = self.client.get_server_metadata()
        self.assertTrue(metadata["name"])
        self.assertTrue(metadata["version"])
        self.assertIn("binary_tensor_data", metadata["extensions"])


class Metadata(ServerTestCase):
    def test_model_metadata_shows_the_batch_as_minus_one(self):
        metadata = self.client.get_model_metadata("affine")
        self.assertEqual(metadata["name"], "affine")
        self.assertEqual(metadata["versions"], ["1"])
        self.assertEqual(metadata["platform"], "onnxruntime_onnx")
        self.assertEqual(metadata["inputs"], [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}])
        self.assertEqual(metadata["outputs"], [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}])

    def test_every_datatype_has_its_name(self):
        metadata = self.client.get_model_metadata("datatypes")
        names = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
        self.assertEqual(names, {f"in_{name.lower()}": name for name in names.values()})
        self.assertEqual(len(names), 14)

    def test_config_has_a_batch_size_and_dims_without_the_batch(self):
        config = self.client.get_model_config("affine")
        self.assertEqual(config["name"], "affine")
        self.assertGreater(config["max_batch_size"], 1)
        self.assertEqual(config["input"][0]["dims"], [4])
        self.assertEqual(config["input"][0]["data_type"], "TYPE_FP32")

    def test_a_model_without_a_batch_keeps_its_whole_shape(self):
        config = self.client.get_model_config("no_batch")
        self.assertEqual(config["max_batch_size"], 0)
        self.assertEqual(config["input"][0]["dims"], [2, 3])
        self.assertEqual(self.client.get_model_metadata("no_batch")["inputs"][0]["shape"], [2, 3])

    def test_an_unknown_model_is_404(self):
        self.assert_refused(404, ["nobody"], self.client.get_model_metadata, "nobody")
        self.assert_refused(404, ["nobody"], self.client.get_model_config, "nobody")
        self.assert_refused(404, ["affine"], self.client.get_model_metadata, "affine", "7")


class Infer(ServerTestCase):
    def test_binary_and_json_answer_alike(self):
        for binary in (True, False):
            self.assert_same(self.infer("affine", {"x": ROWS}, binary)["y"], 2 * ROWS + 1)

    def test_json_in_and_binary_out_and_the_reverse(self):
        for binary_in, binary_out in ((False, True), (True, False)):
            result = self.client.infer("affine", as_inputs({"x": ROWS}, binary_in), outputs=requested(y=binary_out))
            self.assert_same(result.as_numpy("y"), 2 * ROWS + 1)
            self.assertEqual("data" in result.get_output("y"), not binary_out)

    def test_forms_mix_within_one_request(self):
        arrays = {"ids": np.array([[3, 5]], dtype=np.int64), "mask": np.array([[1, 1]], dtype=np.int64)}
        inputs = as_inputs(arrays, {"ids": True, "mask": False})
        result = self.client.infer("varlen", inputs, outputs=requested(doubled=False, mean=True))
        self.assert_same(result.as_numpy("doubled"), np.array([[6, 10]], dtype=np.float32))
        self.assert_same(result.as_numpy("mean"), np.array([[4]], dtype=np.float32))

    def test_only_requested_outputs_come_back(self):
        arrays = {"ids": np.array([[3, 5]], dtype=np.int64), "mask": np.array([[1, 0]], dtype=np.int64)}
        self.assertEqual(list(self.infer("varlen", arrays, outputs=requested(mean=True))), ["mean"])

    def test_the_request_id_and_the_version_come_back(self):
        response = self.client.infer("affine", as_inputs({"x": ROWS}), request_id="a-1", model_version="1").get_response()
        self.assertEqual((response["id"], response["model_name"], response["model_version"]), ("a-1", "affine", "1"))
        self.assertNotIn("id", self.client.infer("affine", as_inputs({"x": ROWS})).get_response())

    def test_an_output_whose_shape_depends_on_the_data(self):
        x = np.array([[0, 1, 0, 2], [3, 0, 0, 0]], dtype=np.float32)
        self.assert_same(self.infer("nonzero", {"x": x})["coordinates"], np.array([[0, 1], [0, 3], [1, 0]]))
        self.assert_same(self.infer("nonzero", {"x": 0 * x})["coordinates"], np.empty((0, 2), dtype=np.int64))

    def test_models_that_cannot_be_batched_answer_each_request_as_it_is(self):
        table = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
        self.assert_same(self.infer("no_batch", {"x": table})["y"], 2 * table)
        self.assert_same(self.infer("bad_output_fixed", {"x": ROWS})["total"], ROWS.sum().reshape(1, 1))
        self.assert_same(self.infer("bad_output_unnamed", {"x": ROWS})["total"], ROWS.sum().reshape(1, 1))
        self.assert_same(self.infer("bad_output_symbolic", {"x": ROWS})["columns"], ROWS.sum(axis=0))

    def test_the_batch_may_be_the_last_axis(self):
        columns = np.ascontiguousarray(ROWS.T)
        self.assert_same(self.infer("batch_last", {"x": columns})["y"], 3 * columns - 1)

    def test_a_convolution(self):
        image = np.random.default_rng(1).integers(-3, 4, (2, 3, 16, 16)).astype(np.float32)
        padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
        around = sum(padded[:, :, dy:dy + 16, dx:dx + 16] for dy in range(3) for dx in range(3)).sum(axis=1, keepdims=True)
        expected = np.maximum(np.concatenate([around, image], axis=1), 0).sum(axis=(2, 3))
        self.assert_same(self.infer("conv", {"image": image})["sums"], expected)


class AioInfer(ServerTestCase):
    def test_the_asyncio_client(self):
        async def talk():
            async with aio_client.InferenceServerClient(self.server.url, conn_timeout=PATIENCE) as client:
                self.assertTrue(await client.is_server_ready())
                self.assertEqual((await client.get_model_metadata("affine"))["name"], "affine")
                result = await client.infer("affine", as_inputs({"x": ROWS}))
                self.assert_same(as_outputs(result)["y"], 2 * ROWS + 1)
                with self.assertRaises(InferenceServerException) as caught:
                    await client.infer("nobody", as_inputs({"x": ROWS}))
                self.assertIn("nobody", caught.exception.message())

                async def one(number):
                    row = np.full((1, 4), number, dtype=np.float32)
                    return number, as_outputs(await client.infer("affine", as_inputs({"x": row})))["y"]

                for number, answer in await asyncio.gather(*map(one, range(200))):
                    self.assert_same(answer, np.full((1, 4), 2 * number + 1, dtype=np.float32))

        asyncio.run(talk())


class Refusals(ServerTestCase):
    def refuse(self, status, words, model, inputs, **options):
        self.assert_refused(status, words, self.client.infer, model, inputs, **options)

    def refuse_body(self, status, words, body, headers=None, path="/v2/models/affine/infer"):
        """The same for a body that no client library would send; the error is JSON and readable."""
        got, answer_headers, answer = self.server.request("POST", path, body, headers)
        self.assertEqual(got, status, answer)
        self.assertEqual(answer_headers["content-type"], "application/json")
        for word in words:
            self.assertIn(word, json.loads(answer)["error"].lower())

    def test_unknown_models_and_versions(self):
        self.refuse(404, ["nobody"], "nobody", as_inputs({"x": ROWS}))
        self.refuse(404, ["affine"], "affine", as_inputs({"x": ROWS}), model_version="7")

    def test_wrong_tensors(self):
        for arrays, words in (
            ({"x": ROWS[:, :3].copy()}, ["x", "4", "3"]),
            ({"x": ROWS[0]}, ["x", "4"]),
            ({"x": ROWS.astype(np.float64)}, ["x", "FP64", "FP32"]),
            ({"z": ROWS}, ["z"]),
            ({"x": ROWS, "z": ROWS}, ["z"]),
            ({}, ["x"]),
        ):
            with self.subTest(words=words):
                self.refuse(400, words, "affine", as_inputs(arrays))

    def test_inputs_that_differ_in_rows(self):
        ids, mask = np.ones((2, 3), dtype=np.int64), np.ones((1, 3), dtype=np.int64)
        self.refuse(400, ["mask"], "varlen", as_inputs({"ids": ids, "mask": mask}))

    def test_inputs_that_disagree_on_a_named_dimension(self):
        ids, mask = np.ones((2, 3), dtype=np.int64), np.ones((2, 4), dtype=np.int64)
        self.refuse(400, ["mask", "sequence"], "varlen", as_inputs({"ids": ids, "mask": mask}))

    def test_unknown_outputs(self):
        self.refuse(400, ["q"], "affine", as_inputs({"x": ROWS}), outputs=requested(q=True))

    def test_malformed_bodies(self):
        row = '{"inputs":[{"name":"x","shape":[1,4],"datatype":"%s","data":%s}]}'
        for body in (b"", b"{", b"[]", b"{}", row % ("FP32", "[1,2,3]"), row % ("FP32", '["a",2,3,4]'),
                     row % ("FLOAT", "[1,2,3,4]"), row % ("FP32", "null"), row % ("FP32", "[1,2,3,4") + "}",
                     row.replace("[1,4]", "[-1,4]") % ("FP32", "[1,2,3,4]")):
            with self.subTest(body=body):
                self.refuse_body(400, [], body)

    def test_integers_out_of_range_are_not_wrapped(self):
        body = '{"inputs":[{"name":"index","shape":[1,1],"datatype":"INT64","data":[%s]}]}'
        for number in ("9223372036854775808", "1.5", "true"):
            self.refuse_body(400, [], body % number, path="/v2/models/fails/infer")

    def test_binary_framing(self):
        header = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}]}'
        name = "Inference-Header-Content-Length"
        for body, value in ((header + bytes(16), "x"), (header + bytes(16), "-1"), (header + bytes(16), "9999"),
                            (header + bytes(15), str(len(header))), (header + bytes(17), str(len(header)))):
            with self.subTest(value=value, length=len(body)):
                self.refuse_body(400, [], body, {name: value})

    def test_unknown_content_encoding(self):
        self.refuse_body(415, [], b"x", {"Content-Encoding": "br"})

    def test_shared_memory_is_refused(self):
        entry = http_client.InferInput("x", [1, 4], "FP32")
        entry.set_shared_memory("region", 16)
        self.refuse(404, ["region"], "affine", [entry])

    def test_unknown_paths_and_methods(self):
        self.refuse_body(404, [], b"", path="/v2/nothing")
        self.refuse_body(405, [], b"", path="/v2/health/live")

    def test_the_connection_lives_on_after_an_error(self):
        with self.server.client(concurrency=1) as client:
            self.assert_refused(404, ["nobody"], client.infer, "nobody", as_inputs({"x": ROWS}))
            self.assert_same(as_outputs(client.infer("affine", as_inputs({"x": ROWS})))["y"], 2 * ROWS + 1)
