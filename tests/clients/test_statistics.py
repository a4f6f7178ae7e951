"""The statistics extension as tritonclient reads it."""
import time

import numpy as np
from harness import ServerTestCase, as_inputs, in_threads, infer

FIELDS = {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"}


def row(number):
    return {"x": np.full((1, 4), number, dtype=np.float32)}


class Statistics(ServerTestCase):
    def of(self, model, version=""):
        [entry] = self.client.get_inference_statistics(model, version)["model_stats"]
        return entry

    def test_counts_are_those_of_what_was_sent(self):
        before, begun = self.of("affine"), time.time()

        def work(number):
            with self.server.client() as client:
                for _ in range(5):
                    infer(client, "affine", row(number))

        in_threads(8, work)
        self.infer("affine", {"x": np.zeros((7, 4), dtype=np.float32)})
        after = self.of("affine", "1")
        self.assertEqual((after["name"], after["version"]), ("affine", "1"))
        self.assertEqual(after["inference_count"] - before["inference_count"], 8 * 5 + 7)
        executions = after["execution_count"] - before["execution_count"]
        self.assertTrue(0 < executions <= 8 * 5 + 7, executions)
        old, new = before["inference_stats"], after["inference_stats"]
        self.assertEqual(set(new), FIELDS)
        grown = {name: (new[name]["count"] - old[name]["count"], new[name]["ns"] - old[name]["ns"]) for name in FIELDS}
        for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            self.assertEqual(grown[name][0], 8 * 5 + 1, name)
        parts = sum(grown[name][1] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
        self.assertEqual(parts, grown["success"][1], "waiting and computing are the whole of a request")
        self.assertEqual(grown["fail"][0], 0)
        self.assertTrue(begun * 1000 - 1 <= after["last_inference"] <= time.time() * 1000 + 1)

    def test_batches_by_size_add_up(self):
        self.infer("affine", {"x": np.zeros((3, 4), dtype=np.float32)})
        entry = self.of("affine")
        sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in entry["batch_stats"]}
        self.assertEqual(sum(size * count for size, count in sizes.items()), entry["inference_count"])
        self.assertEqual(sum(sizes.values()), entry["execution_count"])

    def test_a_failing_model_counts_as_failing(self):
        before = self.of("fails")["inference_stats"]
        bad = as_inputs({"index": np.array([[99]], dtype=np.int64)})
        self.assert_refused(500, ["model"], self.client.infer, "fails", bad)
        after = self.of("fails")["inference_stats"]
        self.assertEqual(after["fail"]["count"] - before["fail"]["count"], 1)
        self.assertEqual(after["success"], before["success"])

    def test_every_model_is_there_with_its_memory(self):
        entries = self.client.get_inference_statistics()["model_stats"]
        ready = [model["name"] for model in self.client.get_model_repository_index() if model["state"] == "READY"]
        self.assertEqual([entry["name"] for entry in entries], ready)
        self.assertTrue(all(entry["memory_usage"][0]["type"] == "CPU" for entry in entries))
        self.assertTrue(any(entry["memory_usage"][0]["byte_size"] > 0 for entry in entries))

    def test_unknown_models_are_404(self):
        self.assert_refused(404, ["nobody"], self.client.get_inference_statistics, "nobody")
        self.assert_refused(404, ["7"], self.client.get_inference_statistics, "affine", "7")
        self.assertIn("statistics", self.client.get_server_metadata()["extensions"])
