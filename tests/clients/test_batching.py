"""Rows of many clients run together, and each answer belongs to the row that asked."""
import numpy as np
from harness import ServerTestCase, as_inputs, in_threads, infer
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

CLIENTS, REQUESTS = 64, 40


class Batching(ServerTestCase):
    def largest_batch(self, model):
        return self.client.get_model_config(model)["max_batch_size"]

    def test_any_number_of_rows(self):
        largest = self.largest_batch("affine")
        for rows in (1, 2, 3, largest - 1, largest, largest + 1, 3 * largest + 1):
            x = np.random.default_rng(rows).integers(-1000, 1000, (rows, 4)).astype(np.float32)
            self.assert_same(self.infer("affine", {"x": x})["y"], 2 * x + 1)

    def test_a_request_larger_than_a_batch_on_the_last_axis(self):
        x = np.arange(4 * (2 * self.largest_batch("batch_last") + 3), dtype=np.float32).reshape(4, -1)
        self.assert_same(self.infer("batch_last", {"x": x})["y"], 3 * x - 1)

    def test_rows_that_cost_memory(self):
        x = np.random.default_rng(0).random((200, 1), dtype=np.float32)
        self.assert_same(self.infer("wide", {"x": x})["y"], 3 * x)

    def test_strings_stay_with_their_row(self):
        width, rows = 2, 2 * self.largest_batch("datatypes") + 1
        texts = np.array([f"{row}/{column}" * (row % 7) for row in range(rows) for column in range(width)], dtype=object)
        arrays = {entry["name"]: np.zeros((rows, width), dtype=triton_to_np_dtype(entry["datatype"]))
                  for entry in self.client.get_model_metadata("datatypes")["inputs"]}
        arrays["in_bytes"] = np.array([text.encode() for text in texts], dtype=object).reshape(rows, width)
        arrays["in_uint64"] = np.arange(rows * width, dtype=np.uint64).reshape(rows, width)
        outputs = self.infer("datatypes", arrays)
        self.assert_same(outputs["out_bytes"], arrays["in_bytes"])
        self.assert_same(outputs["out_uint64"], arrays["in_uint64"])

    def each_client(self, model, make, check):
        """CLIENTS threads ask REQUESTS times each; every answer is checked against its own question."""
        def work(number):
            random = np.random.default_rng(number)
            with self.server.client() as client:
                for _ in range(REQUESTS):
                    inputs = make(random)
                    check(inputs, infer(client, model, inputs, binary=bool(random.integers(2))))

        in_threads(CLIENTS, work)

    def test_64_clients_at_once(self):
        self.each_client(
            "affine",
            lambda random: {"x": random.integers(-9999, 9999, (random.integers(1, 9), 4)).astype(np.float32)},
            lambda inputs, outputs: self.assert_same(outputs["y"], 2 * inputs["x"] + 1))

    def test_64_clients_with_rows_of_different_lengths(self):
        def make(random):
            shape = (random.integers(1, 4), random.integers(1, 20))
            return {"ids": random.integers(0, 1000, shape), "mask": random.integers(0, 2, shape)}

        def check(inputs, outputs):
            ids, mask = inputs["ids"], inputs["mask"]
            self.assert_same(outputs["doubled"], (2 * ids).astype(np.float32))
            total, count = (ids * mask).sum(axis=1, keepdims=True), mask.sum(axis=1, keepdims=True)
            self.assert_same(outputs["mean"], total.astype(np.float32) / np.maximum(count, 1).astype(np.float32))

        self.each_client("varlen", make, check)

    def test_requests_are_not_joined_where_rows_depend_on_each_other(self):
        self.each_client(
            "coupled",
            lambda random: {"x": random.integers(-9999, 9999, (random.integers(1, 9), 4)).astype(np.float32)},
            lambda inputs, outputs: self.assert_same(outputs["y"], inputs["x"] - inputs["x"].max()))

    def test_one_row_that_fails_leaves_its_neighbours_alone(self):
        def work(number):
            with self.server.client() as client:
                for turn in range(REQUESTS):
                    index = (number + turn) % 12  # 10 and 11 are out of range.
                    try:
                        outputs = infer(client, "fails", {"index": np.array([[index]], dtype=np.int64)})
                        self.assert_same(outputs["y"], np.array([[10 * index]], dtype=np.float32))
                        self.assertLess(index, 10)
                    except InferenceServerException as refusal:
                        self.assertEqual((index >= 10, refusal.status()), (True, "500"), refusal.message())

        in_threads(16, work)

    def test_rows_run_together(self):
        """64 requests of 50 ms each, sent at once, take far fewer runs than requests."""
        def work(number):
            with self.server.client() as client:
                x = np.array([[number]], dtype=np.float32)
                self.assert_same(infer(client, "slow", {"x": x})["y"], x)

        def counts():
            labels = '{model="slow",version="1"}'
            return [self.server.metric(f"concertina_batch_rows_{kind}{labels}") for kind in ("sum", "count")]

        rows, runs = counts()
        in_threads(CLIENTS, work)
        self.assertEqual(counts()[0] - rows, CLIENTS)
        self.assertLess(counts()[1] - runs, CLIENTS / 2)

    def test_a_request_whose_time_is_over_is_refused(self):
        x = np.zeros((1, 1), dtype=np.float32)

        def work(number):
            with self.server.client() as client:
                try:
                    client.infer("slow", as_inputs({"x": x}), timeout=1000)  # Microseconds; a run takes longer.
                    return None
                except InferenceServerException as refusal:
                    return refusal.status()

        self.assertIn("504", in_threads(8, work))
