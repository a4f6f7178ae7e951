"""The image as an operator runs it: small, with next to no rights, squeezed, stopped and restarted under load.

Needs a Docker engine and the image concertina:0.1.0 (CONCERTINA_IMAGE names another); `make test-container` makes it.
"""
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import uuid
from http.client import HTTPException
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/clients"))

import numpy as np  # noqa: E402
import tritonclient.http as http_client  # noqa: E402
from harness import as_inputs, as_outputs, free_port, wait_until  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

IMAGE = os.environ.get("CONCERTINA_IMAGE", "concertina:0.1.0")
# What the process itself and the weights of minilm need, and room for a few rows of 256 tokens.
SQUEEZED = "216m"
LARGEST_IMAGE = 120 * 2**20


def docker(*arguments, check=True):
    found = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if check and found.returncode:
        raise AssertionError(f"docker {' '.join(arguments)}: {found.stderr}")
    return found.stdout.strip()


class Container:
    """One running container with as few rights as it needs; `models` are {name: folder}."""

    def __init__(self, models, *flags, memory="2g"):
        self.name, self.port = f"concertina-test-{uuid.uuid4().hex[:8]}", free_port()
        self.url = f"127.0.0.1:{self.port}"
        mounts = [part for name, folder in models.items() for part in ("--volume", f"{folder}:/models/{name}:ro")]
        docker("run", "--detach", "--name", self.name, "--read-only", "--tmpfs", "/tmp:size=16m", "--cap-drop", "ALL",
               "--security-opt", "no-new-privileges", "--memory", memory, "--memory-swap", memory, "--health-interval", "1s",
               "--publish", f"127.0.0.1:{self.port}:8000", *mounts, IMAGE, "serve", *flags)

    def inspect(self, path):
        return docker("inspect", "--format", "{{" + path + "}}", self.name)

    def healthy(self):
        if self.inspect(".State.Running") != "true":
            raise AssertionError(f"the container has ended: {self.logs()}")
        return self.inspect(".State.Health.Status") == "healthy"

    def wait(self):
        wait_until(self.healthy, "the health check turns healthy")
        return self

    def logs(self):
        found = subprocess.run(["docker", "logs", "--tail", "30", self.name], capture_output=True, text=True)
        return found.stdout + found.stderr

    def client(self):
        return http_client.InferenceServerClient(self.url, network_timeout=60.0, connection_timeout=60.0)

    def metric(self, name, *labels):
        """The sum of the lines of one metric that have these labels."""
        with self.client() as client:
            text = client._get("metrics", {}, {}).read().decode()
        lines = [line for line in text.splitlines() if line.startswith(name) and all(label in line for label in labels)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def ready(self):
        try:
            with http_client.InferenceServerClient(self.url, network_timeout=2.0, connection_timeout=2.0) as client:
                return client.is_server_ready()
        except (OSError, HTTPException):
            # Refused, or ended in the middle: the process is going.
            return False

    def stop(self):
        """As an orchestrator ends it; the exit code."""
        docker("stop", "--time", "60", self.name)
        return int(self.inspect(".State.ExitCode"))

    def remove(self):
        docker("rm", "--force", self.name, check=False)


AFFINE = {"affine": ROOT / "tests/models/affine"}
MINILM = {"minilm": ROOT / "models/minilm"}


@contextlib.contextmanager
def load(clients, work):
    """`work(number, count, stop)` again and again in threads of its own, until the block ends; failures are raised."""
    over, failures, counts = threading.Event(), [], []

    def run(number):
        count = 0
        try:
            while not over.is_set():
                work(number, count)
                count += 1
        except Exception as error:  # noqa: BLE001 - a thread's failure is the test's
            failures.append(repr(error))
        counts.append(count)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise AssertionError(f"{len(failures)} of {clients} clients failed, the first with {failures[0]}")


class Image(unittest.TestCase):
    def test_it_is_small_and_says_what_it_is(self):
        (image,) = json.loads(docker("image", "inspect", IMAGE))
        print(f"\nimage {IMAGE}: {image['Size'] / 2**20:.1f} MiB", flush=True)
        self.assertLess(image["Size"], LARGEST_IMAGE)
        self.assertEqual(image["Config"]["User"], "10001:10001")
        self.assertEqual(image["Config"]["Labels"]["org.opencontainers.image.licenses"], "Apache-2.0")

    def test_nothing_but_the_server_can_be_run(self):
        for program in ("/bin/sh", "/usr/bin/env", "/usr/bin/cargo", "/usr/bin/gcc", "/usr/bin/apt"):
            found = subprocess.run(["docker", "run", "--rm", "--entrypoint", program, IMAGE], capture_output=True, text=True)
            self.assertNotEqual(found.returncode, 0, program)
            self.assertIn("no such file", found.stderr.lower())

    def test_what_is_wrong_is_said_and_ends_it(self):
        found = subprocess.run(["docker", "run", "--rm", IMAGE, "check", "--set", "model.pipeline=9"], capture_output=True, text=True)
        self.assertEqual(found.returncode, 1)
        self.assertIn("model.pipeline", found.stdout)


class Running(unittest.TestCase):
    def start(self, *arguments, **options):
        container = Container(*arguments, **options)
        self.addCleanup(container.remove)
        return container

    def test_it_serves_without_rights_and_its_health_follows_it(self):
        container = self.start(AFFINE).wait()
        self.assertEqual({line.split()[1] for line in docker("top", container.name, "-o", "pid,uid").splitlines()[1:]}, {"10001"})
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        with container.client() as client:
            answer = as_outputs(client.infer("affine", as_inputs({"x": x})))["y"]
        np.testing.assert_array_equal(answer, 2 * x + 1)
        self.assertEqual(container.stop(), 0, container.logs())

    def test_a_model_that_cannot_be_served_keeps_it_from_turning_healthy(self):
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        folder.chmod(0o755)
        (folder / "model.onnx").write_bytes(b"not a model")
        container = self.start({"broken": folder})
        wait_until(lambda: "loading is over" in container.logs(), "it says so")
        found = subprocess.run(["docker", "exec", container.name, "/usr/local/bin/concertina", "healthcheck"], capture_output=True, text=True)
        self.assertEqual((found.returncode, "503" in found.stderr), (1, True), found.stderr + container.logs())

    def test_squeezed_it_answers_everything_and_lives(self):
        # Without the knee, memory alone bounds a batch.
        container = self.start(MINILM, "--set", "model.knee_tolerance=0", memory=SQUEEZED).wait()
        random = np.random.default_rng(1)
        rows = [{"input_ids": random.integers(1000, 20000, (4, 256)), "attention_mask": np.ones((4, 256), np.int64),
                 "token_type_ids": np.zeros((4, 256), np.int64)} for _ in range(8)]
        wanted = [http_client.InferRequestedOutput("sentence_embedding")]
        with container.client() as client:
            alone = [as_outputs(client.infer("minilm", as_inputs(row), outputs=wanted))["sentence_embedding"] for row in rows]

        def work(number, count):
            with container.client() as client:
                index = (number + count) % len(rows)
                result = client.infer("minilm", as_inputs(rows[index]), outputs=wanted)
                np.testing.assert_allclose(as_outputs(result)["sentence_embedding"], alone[index], atol=1e-4)

        with load(24, work) as counts:
            time.sleep(20)
        limited = container.metric("concertina_batch_limited_total", 'by="bytes"')
        print(f"\nsqueezed into {SQUEEZED}: {sum(counts)} requests of 4 rows in 20 s, {limited:.0f} batches limited by bytes", flush=True)
        self.assertGreater(limited, 0, "the limit was never felt: it should be smaller")
        self.assertEqual(container.inspect(".State.OOMKilled"), "false")
        self.assertEqual(container.stop(), 0, container.logs())

    def test_stopped_under_load_it_loses_nothing(self):
        container = self.start(AFFINE).wait()
        announced = threading.Event()

        def work(number, count):
            if announced.is_set():
                time.sleep(0.05)
                return
            ask(container, number, count)

        with load(16, work) as counts:
            time.sleep(1)
            stopping = threading.Thread(target=container.stop)
            stopping.start()
            wait_until(lambda: not container.ready(), "readiness says no")
            announced.set()
            stopping.join()
        print(f"\nstopped under load: {sum(counts)} requests, none lost", flush=True)
        self.assertEqual(container.inspect(".State.ExitCode"), "0", container.logs())

    def test_a_rolling_restart_loses_nothing(self):
        """Two replicas behind clients that, like a balancer, send only to those that were ready a moment ago."""
        replicas = [self.start(AFFINE, "--drain-announce", "2s").wait() for _ in range(2)]
        ready = {replica.name: True for replica in replicas}
        over = threading.Event()

        def watch():
            while not over.wait(0.2):
                ready.update({replica.name: replica.ready() for replica in replicas})

        watcher = threading.Thread(target=watch)
        watcher.start()

        def work(number, count):
            open_ = [replica for replica in replicas if ready[replica.name]]
            ask(open_[(number + count) % len(open_)], number, count)

        try:
            with load(16, work) as counts:
                for replica in replicas:
                    docker("restart", "--time", "60", replica.name)
                    wait_until(lambda: replica.healthy() and ready[replica.name], "the replica is back")
        finally:
            over.set()
            watcher.join()
        print(f"\nrolling restart of two: {sum(counts)} requests, none failed", flush=True)


def ask(container, number, count):
    """One request over a connection of its own, with the right answer."""
    x = np.array([[number, count, 0, 1]], dtype=np.float32)
    with container.client() as client:
        try:
            answer = as_outputs(client.infer("affine", as_inputs({"x": x})))["y"]
        except InferenceServerException as error:
            raise AssertionError(f"{container.name}: {error.status()} {error.message()}") from error
    np.testing.assert_array_equal(answer, 2 * x + 1)


if __name__ == "__main__":
    unittest.main()
