"""SIGTERM under load: no request that was accepted is lost, and the exit code is 0."""
import concurrent.futures
import http.client
import json
import threading
import unittest

import numpy as np
from harness import PATIENCE, TEST_MODELS, Server, as_inputs, as_outputs, wait_until

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [7]}]})


class Shutdown(unittest.TestCase):
    def setUp(self):
        self.server = Server(TEST_MODELS, "--drain-announce", "2s")
        self.addCleanup(self.server.kill)

    def assert_clean_exit(self):
        self.assertEqual(self.server.wait(), 0, self.server.log_tail())

    def test_an_idle_server_ends(self):
        self.server.terminate()
        self.assert_clean_exit()

    def test_ready_says_no_while_everything_is_still_served(self):
        self.server.terminate()
        wait_until(lambda: self.server.status("/v2/health/ready") == 503, "the server announces that it will end")
        self.assertEqual(self.server.status("/v2/health/live"), 200)
        status, _, answer = self.server.request("POST", "/v2/models/slow/infer", BODY)
        self.assertEqual((status, json.loads(answer)["outputs"][0]["data"]), (200, [7]))
        self.assert_clean_exit()

    def test_what_waits_in_the_queue_is_answered(self):
        connections = [http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE) for _ in range(32)]
        for connection in connections:
            connection.request("POST", "/v2/models/slow/infer", BODY)
        # Connections are accepted in order: an answer to a later one means that these have been.
        self.assertEqual(self.server.status("/v2/health/live"), 200)
        self.server.terminate()
        for connection in connections:
            response = connection.getresponse()
            answer = response.read()
            self.assertEqual(response.status, 200, answer)
            self.assertEqual(json.loads(answer)["outputs"][0]["data"], [7])
            connection.close()
        self.assert_clean_exit()

    def test_clients_that_watch_readiness_lose_nothing(self):
        """As behind a load balancer: it sends until readiness says no, and every request has its right answer."""
        announced, counts = threading.Event(), []

        def load(number):
            with self.server.client() as client:
                count = 0
                while not announced.is_set():
                    x = np.array([[number, count, 0, 1]], dtype=np.float32)
                    answer = as_outputs(client.infer("affine", as_inputs({"x": x})))["y"]
                    np.testing.assert_array_equal(answer, 2 * x + 1)
                    count += 1
                counts.append(count)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            running = [pool.submit(load, number) for number in range(16)]
            try:
                # Under load already when the signal comes.
                wait_until(lambda: self.server.status("/v2/models/affine/ready") == 200 and served(self.server) >= 200, "load")
                self.server.terminate()
                wait_until(lambda: self.server.status("/v2/health/ready") != 200, "readiness says no")
            finally:
                announced.set()
            for future in running:
                future.result()
        self.assertGreaterEqual(sum(counts), 200)
        self.assert_clean_exit()


def served(server):
    """Rows that the model `affine` has answered."""
    return server.metric('concertina_batch_rows_sum{model="affine",version="1"}')
