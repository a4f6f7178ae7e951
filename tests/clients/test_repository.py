"""Models come and go while the server serves: by request as tritonclient makes it, and by changes of the folder."""
import json
import os
import shutil
import tempfile
import threading
import time
import unittest
from pathlib import Path

import numpy as np
from harness import PATIENCE, TEST_MODELS, Server, ServerTestCase, as_inputs, infer, wait_until

TOKEN = "correct-horse-battery"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
ROW = np.array([[1, 2, 3, 4]], dtype=np.float32)


def affine(factor):
    """An ONNX model with the tensors of `affine`: y = factor * x + 1, made by changing the constant in its bytes."""
    text = (TEST_MODELS / "affine/1/model.onnx").read_bytes()
    two, new = np.float32(2).tobytes(), np.float32(factor).tobytes()
    assert text.count(two) == 1
    return text.replace(two, new)


def naming(file):
    """The bytes that give an ONNX model one more tensor, whose values lie in this file."""
    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content
    location = field(1, b"location") + field(2, file.encode())
    return field(7, field(5, field(8, b"more") + field(13, location) + b"\x70\x01"))


def put(folder, name, version, content):
    """Whole at once, as a careful operator does it."""
    path = Path(folder) / name / str(version)
    path.mkdir(parents=True, exist_ok=True)
    (path / ".part").write_bytes(content)
    (path / ".part").rename(path / "model.onnx")


class Load:
    """Sends to a model in threads until told to stop; every answer must be 200 and one of those that are right."""

    def __init__(self, server, model, factors, threads=3):
        self.server, self.model, self.factors = server, model, factors
        self.stop, self.faults, self.seen = threading.Event(), [], []
        self.threads = [threading.Thread(target=self.run) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def run(self):
        with self.server.client() as client:
            while not self.stop.is_set():
                try:
                    y = infer(client, self.model, {"x": ROW})["y"]
                    factor = float(y[0, 0] - 1)
                    if factor not in self.factors:
                        raise AssertionError(f"a wrong answer: {y}")
                    self.seen.append(factor)
                except Exception as error:
                    self.faults.append(f"{error!r}: {error}")
                    return

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(PATIENCE)
        assert not self.faults, self.faults
        return self.seen


class OnRequest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        for name in ("a", "b"):
            put(self.folder, name, 1, affine(2))
        self.start()

    def start(self, *options):
        self.server = Server(self.folder, "--admin-token", TOKEN, "--set", "model.warmup.seconds=0", *options)
        self.addCleanup(self.server.kill)
        self.client = self.server.client()
        self.addCleanup(self.client.close)

    def states(self):
        index = self.client.get_model_repository_index()
        return {(entry["name"], entry["version"]): entry["state"] for entry in index}

    def y(self, model, version=""):
        result = self.client.infer(model, as_inputs({"x": ROW}), model_version=version)
        return float(result.as_numpy("y")[0, 0])

    def refuse(self, status, words, call, *arguments, **options):
        return ServerTestCase.assert_refused(self, status, words, call, *arguments, **options)

    def test_unloading_and_loading_while_another_model_serves(self):
        load = Load(self.server, "b", {2.0})
        for _ in range(3):
            self.client.unload_model("a", headers=BEARER)
            self.assertEqual(self.states()["a", "1"], "UNAVAILABLE")
            self.assertTrue(self.client.is_server_ready(), "what was unloaded on purpose is not missed")
            self.refuse(503, ["unloaded"], self.y, "a")
            self.client.load_model("a", headers=BEARER)
            self.assertEqual(self.y("a"), 3)
        self.assertTrue(load.end())

    def test_a_new_version_takes_over_without_a_lost_request(self):
        load = Load(self.server, "a", {2.0, 5.0})
        put(self.folder, "a", 2, affine(5))
        self.client.load_model("a", headers=BEARER)
        self.assertEqual(self.y("a"), 6)
        wait_until(lambda: 5.0 in load.seen[-3:], "the load sees the new version")
        seen = load.end()
        self.assertIn(2.0, seen)
        self.assertEqual(self.states(), {("a", "2"): "READY", ("b", "1"): "READY"})
        self.refuse(404, ["version 1"], self.y, "a", "1")
        wait_until(lambda: 'a/1/' not in self.arenas(), "the old version's memory is given back")

    def arenas(self):
        return self.server.request("GET", "/admin/memory", headers=BEARER)[2].decode()

    def test_a_changed_file_of_the_same_version_takes_over_too(self):
        load = Load(self.server, "a", {2.0, 7.0})
        put(self.folder, "a", 1, affine(7))
        self.client.load_model("a", headers=BEARER)
        self.assertEqual(self.y("a"), 8)
        load.end()

    def test_a_broken_new_version_changes_nothing(self):
        load = Load(self.server, "a", {2.0})
        put(self.folder, "a", 2, b"not a model")
        self.refuse(400, ["failed to load 'a'"], self.client.load_model, "a", headers=BEARER)
        self.assertEqual(self.states()["a", "2"], "UNAVAILABLE")
        self.assertEqual(self.y("a"), 3)
        self.assertTrue(self.client.is_server_ready(), "a good version serves")
        self.assertTrue(self.client.is_model_ready("a"))
        self.assertTrue(load.end())

    def test_a_configuration_sent_with_the_request_holds(self):
        self.assertNotEqual(self.client.get_model_config("a")["max_batch_size"], 3)
        self.client.load_model("a", headers=BEARER, config=json.dumps({
            "max_batch_size": 3, "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
            "dynamic_batching": {"max_queue_delay_microseconds": 500}}))
        config = self.client.get_model_config("a")
        self.assertEqual(config["max_batch_size"], 3)
        self.assertEqual(config["instance_group"][0]["count"], 2)
        self.assertEqual(config["dynamic_batching"]["max_queue_delay_microseconds"], 500)
        # What was published is accepted again, and without a configuration the files hold alone.
        self.client.load_model("a", headers=BEARER, config=json.dumps(config))
        self.client.load_model("a", headers=BEARER)
        self.assertEqual(self.client.get_model_config("a")["dynamic_batching"]["max_queue_delay_microseconds"], 0)

    def test_what_cannot_be_done_is_refused_by_name(self):
        load, unload = self.client.load_model, self.client.unload_model
        self.refuse(404, ["nobody"], load, "nobody", headers=BEARER)
        self.refuse(404, ["nobody"], unload, "nobody", headers=BEARER)
        self.refuse(401, ["Authorization"], load, "a")
        self.refuse(401, ["Authorization"], unload, "a", headers={"Authorization": "Bearer wrong"})
        for config, word in (('{"max_batch_size": -1}', "max_batch_size"), ("{", "JSON"),
                             ('{"sequence_batching": {}}', "sequence_batching"),
                             ('{"dynamic_batching": {"priority_levels": 1000}}', "priority_levels")):
            self.refuse(400, [word], load, "a", headers=BEARER, config=config)
        self.refuse(400, ["file:1/model.onnx"], load, "a", headers=BEARER, config="{}",
                    files={"file:1/model.onnx": affine(9)})
        self.assertEqual(self.y("a"), 3)

    def test_weights_that_do_not_fit_are_refused_with_the_numbers(self):
        with open(Path(self.folder) / "a/1/weights.bin", "wb") as data:
            data.truncate(1 << 42)  # A hole: it takes no room on the disk.
        put(self.folder, "a", 1, affine(2) + naming("weights.bin"))
        self.refuse(400, ["4.0 TiB on disk", "room for"], self.client.load_model, "a", headers=BEARER)
        self.assertEqual(self.y("a"), 3)

    def test_files_of_weights_that_may_not_be_opened_are_refused_by_name(self):
        os.mkfifo(Path(self.folder) / "a/1/pipe")
        for file, words in (("pipe", "not a regular file"), ("../../b/1/model.onnx", "not in the model's folder"),
                            ("/etc/passwd", "not in the model's folder"), ("missing", "put it beside the model")):
            put(self.folder, "a", 1, affine(2) + naming(file))
            self.refuse(400, [f"'{file}'", words], self.client.load_model, "a", headers=BEARER)
        self.assertEqual(self.y("a"), 3)

    def test_without_models_at_the_start_each_waits_for_a_request(self):
        self.start("--set", "models.load_at_start=none")
        self.assertEqual(set(self.states().values()), {"UNAVAILABLE"})
        self.refuse(503, ["ask for it"], self.y, "a")
        self.client.load_model("a", headers=BEARER)
        self.assertEqual(self.y("a"), 3)
        self.assertEqual(self.states(), {("a", "1"): "READY", ("b", "1"): "UNAVAILABLE"})


class Poll(unittest.TestCase):
    def test_changes_of_the_folder_are_followed_without_a_lost_request(self):
        with tempfile.TemporaryDirectory() as folder:
            put(folder, "a", 1, affine(2))
            server = Server(folder, "--set", "models.poll_interval=100ms", "--set", "model.warmup.seconds=0")
            self.addCleanup(server.kill)
            client = server.client()
            self.addCleanup(client.close)
            load = Load(server, "a", {2.0, 5.0, 6.0})

            def states():
                return {(entry["name"], entry["version"]): entry["state"] for entry in client.get_model_repository_index()}

            put(folder, "a", 2, affine(5))
            wait_until(lambda: states() == {("a", "2"): "READY"}, "version 2 has taken over")
            put(folder, "b", 1, affine(3))
            wait_until(lambda: states().get(("b", "1")) == "READY", "a new model is loaded")
            put(folder, "a", 3, b"not a model")
            wait_until(lambda: states().get(("a", "3")) == "UNAVAILABLE", "version 3 is broken")
            self.assertEqual(states()["a", "2"], "READY")
            self.assertTrue(client.is_server_ready())
            time.sleep(0.5)  # Several looks later nothing is tried again.
            self.assertEqual(server.log_tail().count('cannot be served model="a" version=3'), 1, server.log_tail())
            put(folder, "a", 3, affine(6))
            wait_until(lambda: states().get(("a", "3")) == "READY", "version 3 is repaired")
            self.assertEqual(float(infer(client, "a", {"x": ROW})["y"][0, 0]), 7)
            shutil.rmtree(Path(folder) / "b")
            wait_until(lambda: ("b", "1") not in states(), "model b has gone")
            # Back to an old version.
            shutil.rmtree(Path(folder) / "a/3")
            wait_until(lambda: states() == {("a", "2"): "READY"}, "version 2 serves again")
            seen = load.end()
            self.assertEqual(set(seen), {2.0, 5.0, 6.0})


class WithoutToken(ServerTestCase):
    def test_loading_and_unloading_are_forbidden(self):
        self.assert_refused(403, ["admin.token"], self.client.load_model, "affine")
        self.assert_refused(403, ["admin.token"], self.client.unload_model, "affine")

    def test_the_index_lists_every_model(self):
        states = {entry["name"]: entry["state"] for entry in self.client.get_model_repository_index()}
        self.assertEqual(states["affine"], "READY")
        self.assertEqual(set(states.values()), {"READY"})
