"""Compressed bodies in both directions, by tritonclient and by hand."""
import asyncio
import gzip
import json
import zlib

import numpy as np
import tritonclient.http.aio as aio_client
from harness import PATIENCE, ServerTestCase, as_inputs, as_outputs, wait_until
from test_datatypes import columns

ALGORITHMS = ("gzip", "deflate")


class Compression(ServerTestCase):
    def check(self, arrays, outputs):
        for name, array in arrays.items():
            self.assert_same(outputs[f"out_{name}"], array)

    def inputs(self, arrays):
        return as_inputs({f"in_{name}": array for name, array in arrays.items()})

    def test_the_synchronous_client_with_every_datatype(self):
        for rows in (2, 200):
            arrays = columns(rows)
            for algorithm in ALGORITHMS:
                for options in ({"request_compression_algorithm": algorithm}, {"response_compression_algorithm": algorithm},
                                {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}):
                    with self.subTest(rows=rows, **options):
                        self.check(arrays, as_outputs(self.client.infer("datatypes", self.inputs(arrays), **options)))

    def test_the_asyncio_client_with_every_datatype(self):
        async def talk():
            async with aio_client.InferenceServerClient(self.server.url, conn_timeout=PATIENCE) as client:
                for algorithm in ALGORITHMS:
                    arrays = columns(300)
                    result = await client.infer("datatypes", self.inputs(arrays), request_compression_algorithm=algorithm,
                                                response_compression_algorithm=algorithm)
                    self.check(arrays, as_outputs(result))
                # It asks for compression with every request and takes nothing but inferences apart.
                self.assertEqual((await client.get_model_metadata("affine"))["name"], "affine")
                self.assertTrue((await client.get_inference_statistics("affine"))["model_stats"])

        asyncio.run(talk())

    def test_an_asyncio_call_that_is_cancelled_leaves_the_server(self):
        inside = "concertina_requests_in_flight"

        async def talk():
            async with aio_client.InferenceServerClient(self.server.url, conn_timeout=PATIENCE) as client:
                many = as_inputs({"x": np.full((256, 1), 7, dtype=np.float32)})
                calls = [asyncio.create_task(client.infer("slow", many)) for _ in range(32)]
                await asyncio.to_thread(wait_until, lambda: self.server.metric(inside) > 1, "requests are inside")
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                await asyncio.to_thread(wait_until, lambda: self.server.metric(inside) <= 1, "only this question is inside")

        asyncio.run(talk())

    def test_what_goes_over_the_wire(self):
        zeros = {"x": np.zeros((1000, 4), dtype=np.float32)}
        body, length = self.client.generate_request_body(as_inputs(zeros))
        headers = {"Inference-Header-Content-Length": str(length), "Content-Encoding": "gzip", "Accept-Encoding": "deflate"}
        status, answered, answer = self.server.request("POST", "/v2/models/affine/infer", gzip.compress(body), headers)
        self.assertEqual((status, answered["Content-Encoding"]), (200, "deflate"))
        self.assertLess(len(answer), 1000)
        content = zlib.decompress(answer)
        length = int(answered["Inference-Header-Content-Length"])
        self.assertEqual(json.loads(content[:length])["outputs"][0]["shape"], [1000, 4])
        self.assertEqual(content[length:], np.ones((1000, 4), dtype=np.float32).tobytes())

    def test_floats_that_do_not_shrink_stay_as_they_are(self):
        noise = np.random.default_rng(1).standard_normal((1000, 4)).astype(np.float32)
        body, length = self.client.generate_request_body(as_inputs({"x": noise}))
        headers = {"Inference-Header-Content-Length": str(length), "Accept-Encoding": "gzip"}
        status, answered, _ = self.server.request("POST", "/v2/models/affine/infer", body, headers)
        self.assertEqual((status, answered["Content-Encoding"]), (200, None))

    def test_a_bomb_is_refused_and_the_server_lives_on(self):
        bomb = gzip.compress(bytes(65 << 20))
        for _ in range(3):
            status, _, answer = self.server.request("POST", "/v2/models/affine/infer", bomb, {"Content-Encoding": "gzip"})
            self.assertEqual((status, json.loads(answer)["code"]), (413, "body_too_large"))
        self.assert_same(self.infer("affine", {"x": np.zeros((1, 4), dtype=np.float32)})["y"],
                         np.ones((1, 4), dtype=np.float32))

    def test_what_is_not_compressed_as_it_says_is_refused(self):
        for coding in ALGORITHMS:
            status, _, answer = self.server.request("POST", "/v2/models/affine/infer", b"plain", {"Content-Encoding": coding})
            self.assertEqual(status, 400)
            self.assertIn(coding, json.loads(answer)["error"])
