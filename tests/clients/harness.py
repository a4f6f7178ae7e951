"""Starts the built server on a free port, waits until it is ready, and ends it; and the few things all tests need.

CONCERTINA_BIN names another binary than the one that `cargo build --release` made.
"""
import concurrent.futures
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
from pathlib import Path

import numpy as np
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

ROOT = Path(__file__).resolve().parents[2]
TEST_MODELS = ROOT / "tests/models"
DEMO_MODELS = ROOT / "models"
PATIENCE = 120.0  # Seconds that any wait may take before the test fails.


@functools.cache
def binary():
    """The server's path; cargo is asked where it builds to."""
    if path := os.environ.get("CONCERTINA_BIN"):
        return path
    metadata = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline", "--locked"],
                              cwd=ROOT, check=True, capture_output=True)
    return str(Path(json.loads(metadata.stdout)["target_directory"]) / "release" / "concertina")


def free_port():
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, what):
    """Return the first true value of `condition`; fail when it stays false for PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {PATIENCE:.0f} s in vain: {what}")


class Server:
    """One running server. `options` are further arguments of `concertina serve`."""

    def __init__(self, models, *options):
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        self.grpc_url = f"127.0.0.1:{free_port()}"
        self.log = tempfile.TemporaryFile("w+b")
        runtime = next((ROOT / ".setup/onnxruntime").glob("libonnxruntime.so.*"), "")
        environment = {"CONCERTINA_ONNXRUNTIME": str(runtime)} | os.environ
        command = [binary(), "serve", "--models", str(models), "--address", self.url,
                   "--grpc-address", self.grpc_url, *options]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self.log,
                                        stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: self.alive() and self.status("/v2/health/ready") == 200, "the server is ready")
        except BaseException:
            self.kill()
            raise

    def alive(self):
        """Fails, with the end of the log, when the process has ended."""
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log_tail()}")
        return True

    def log_tail(self):
        self.log.seek(0)
        return self.log.read()[-8000:].decode(errors="replace")

    def request(self, method, path, body=None, headers=None):
        """Status, headers and body over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def metric(self, name):
        """The value of one line of the metrics, by its name with all labels."""
        lines = self.request("GET", "/metrics")[2].decode().splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " ")), 0.0)

    def status(self, path):
        """The status of a GET, None when nobody answers."""
        try:
            return self.request("GET", path)[0]
        except OSError:
            return None

    def client(self, **options):
        """A tritonclient, for one thread only."""
        return http_client.InferenceServerClient(self.url, network_timeout=PATIENCE, connection_timeout=PATIENCE, **options)

    def terminate(self):
        """Ask it to drain and end."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        """The exit code, once it has ended."""
        return self.process.wait(PATIENCE)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


class ServerTestCase(unittest.TestCase):
    """One server for all tests of a class."""

    MODELS = TEST_MODELS
    OPTIONS = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server(cls.MODELS, *cls.OPTIONS)
        cls.addClassCleanup(cls.server.kill)
        cls.client = cls.server.client()
        cls.addClassCleanup(cls.client.close)

    def infer(self, model, inputs, binary=True, **options):
        """All outputs of one request by name; inputs and outputs in the binary form or in JSON."""
        return infer(self.client, model, inputs, binary, **options)

    def assert_refused(self, status, words, call, *arguments, **options):
        """The call fails with this status, and its message has all of these words."""
        with self.assertRaises(InferenceServerException) as caught:
            call(*arguments, **options)
        self.assertEqual(caught.exception.status(), str(status), caught.exception.message())
        for word in words:
            self.assertIn(word.lower(), caught.exception.message().lower())

    def assert_same(self, actual, expected):
        """Equal shape, datatype and elements; NaN equals NaN."""
        self.assertEqual(actual.shape, expected.shape)
        self.assertEqual(actual.dtype, expected.dtype)
        np.testing.assert_array_equal(actual, expected)


def as_inputs(arrays, binary=True):
    """tritonclient's inputs from {name: array}; `binary` for all of them, or {name: bool}."""
    inputs = []
    for name, array in arrays.items():
        entry = http_client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        entry.set_data_from_numpy(array, binary_data=binary[name] if isinstance(binary, dict) else binary)
        inputs.append(entry)
    return inputs


def as_outputs(result):
    """{name: array} from tritonclient's result; strings as bytes, which is what they are in the binary form."""
    arrays = {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}
    for name, array in arrays.items():
        if array.dtype == object:
            values = [value.encode() if isinstance(value, str) else value for value in array.flat]
            arrays[name] = np.array(values, dtype=object).reshape(array.shape)
    return arrays


def in_threads(count, work):
    """`work(number)` for each number below `count`, each in a thread of its own, all at once; their results in order."""
    start = threading.Barrier(count)

    def run(number):
        start.wait(PATIENCE)
        return work(number)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def infer(client, model, inputs, binary=True, **options):
    """All outputs of one request by name."""
    if not binary and "outputs" not in options:
        names = [output["name"] for output in client.get_model_metadata(model)["outputs"]]
        options["outputs"] = [http_client.InferRequestedOutput(name, binary_data=False) for name in names]
    return as_outputs(client.infer(model, as_inputs(inputs, binary), **options))
