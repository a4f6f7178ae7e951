"""The ledger in the metrics adds up at every scrape, under load and while memory comes and goes."""
import json
import os
import threading
import unittest

import numpy as np
from harness import TEST_MODELS, Server, infer, wait_until

GRANULE = 2 << 20
TOKEN = "only-for-this-test"


def ledger(text):
    """The bytes of device 0 by kind."""
    begin = 'concertina_memory_bytes{device="0",kind="'
    lines = [line.removeprefix(begin).split('"} ') for line in text.splitlines() if line.startswith(begin)]
    return {kind: int(value) for kind, value in lines}


class Ledger(unittest.TestCase):
    def test_every_scrape_adds_up_under_load_while_the_limit_changes(self):
        os.environ["CONCERTINA_ADMIN_TOKEN"] = TOKEN
        self.addCleanup(os.environ.pop, "CONCERTINA_ADMIN_TOKEN")
        server = Server(TEST_MODELS / "wide", "--model-name", "wide", "--set", "model.instances=1",
                        "--set", "model.max_batch_size=32", "--cache", "")
        self.addCleanup(server.kill)
        ending, answered, wrong = threading.Event(), [], []

        def ask():
            client = server.client()
            rows = np.arange(40, dtype=np.float32).reshape(-1, 1)
            while not ending.is_set():
                try:
                    if not np.array_equal(infer(client, "wide", {"x": rows}, True)["y"], 3 * rows):
                        wrong.append("another answer")
                except Exception as error:
                    wrong.append(str(error))
                answered.append(None)
            client.close()

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            seen = set()
            for limit in ["auto", "64MiB", "32MiB", "16MiB"] * 3:
                body = json.dumps({"limit": limit})
                status, _, text = server.request("POST", "/admin/memory", body, {"Authorization": f"Bearer {TOKEN}"})
                self.assertEqual(status, 200, text)
                told = json.loads(text)["devices"][0]["limit"]

                def scrape():
                    now = ledger(server.request("GET", "/metrics")[2].decode())
                    self.assertLessEqual(abs(now["committed"] + now["outside"] + now["free"] - now["total"]), GRANULE, now)
                    self.assertLessEqual(now["allocated"], now["committed"], now)
                    seen.add(now["committed"])
                    return now["limit"] == told

                wait_until(scrape, "the metrics have the new limit")
                for _ in range(20):
                    scrape()
            wait_until(lambda: len(answered) > 50, "requests were answered meanwhile")
        finally:
            ending.set()
            for thread in threads:
                thread.join()
        self.assertGreaterEqual(len(seen), 2, "memory came and went")
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
