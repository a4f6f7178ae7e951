#!/usr/bin/env python3
"""Start, load, squeeze: what the metrics, the alerts' expressions and the live page say of it, and what rises first.

1. Load in steps from a fifth of the capacity to one and a half times as much: saturation passes its target (0.5) in an earlier
   step than the p99 passes three full batches. A request that comes to a server that keeps up waits for the batch that runs and then
   runs itself, in the worst case two full ones; beyond three it waits for more than one batch. (Latency as such rises from the
   first step on, with the size of the batches: that is how batching without timers works and says nothing of load.)
2. A squeeze at a load that was served well: saturation passes 1 at once, before any request has waited a second; the expression
   of ConcertinaMemoryShort holds and the page says so. Once it has passed, all of it ends.

The model is tests/browser/costly, whose large batches pay and whose rows cost memory. Expressions, their windows cut to 5 s, are
asked of a real Prometheus (Debian: prometheus), the page of a Chromium, which is opened for the second part: a browser that draws on the
same two cores delays requests by hundreds of milliseconds, and the first part compares latencies. What is not there is skipped, and the report says so. Writes
load-tests/results/acceptance.md (--output); exits 1 if something does not hold.
"""
import argparse
import http.client
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

from common import ROOT, Server, free_port, machine, target_folder

sys.path.insert(0, str(ROOT / "tests/browser"))
from devtools import Browser, executable, wait_until  # noqa: E402

PARTS = [0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5]
TARGET, STEP, ROWS, CLIENTS, BATCH = 0.5, 10.0, 16, 64, 64
# Between the steps the server gives its memory back. The first batches of a step take it again, which took 2 ms for each MB on a
# virtual machine whose host had taken the pages as well: they have a column of their own.
BEGINNING = 2.0
MODEL = ROOT / "tests/browser/costly"


class Load:
    """Requests that are due at a constant rate whatever the server does. Latencies count from when a request was due."""

    def __init__(self, address, rate):
        self.address, self.due, self.ending = address, queue.Queue(), threading.Event()
        self.began = time.monotonic()
        self.latencies, self.refused, self.wrong = [], 0, 0  # Latencies as (when it was due, seconds).
        self.body = json.dumps({"inputs": [{"name": "x", "shape": [ROWS, 1], "datatype": "FP32", "data": list(range(ROWS))}]})
        self.threads = [threading.Thread(target=self.ask, daemon=True) for _ in range(CLIENTS)]
        self.threads.append(threading.Thread(target=self.tick, args=(rate,), daemon=True))
        for thread in self.threads:
            thread.start()

    def tick(self, rate):
        due = time.monotonic()
        while not self.ending.is_set():
            due += 1 / rate
            time.sleep(max(due - time.monotonic(), 0))
            self.due.put(due)
        for _ in range(CLIENTS):
            self.due.put(None)

    def ask(self):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        while (due := self.due.get()) is not None:
            if self.ending.is_set():
                continue  # It was never sent: the load is over.
            connection.request("POST", "/v2/models/costly/infer", self.body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == 200:
                self.wrong += json.loads(text)["outputs"][0]["data"] != [3.0 * row for row in range(ROWS)]
                self.latencies.append((due, time.monotonic() - due))
            else:
                self.refused += 1
        connection.close()

    def end(self):
        self.ending.set()
        for thread in self.threads:
            thread.join()

    def quantile(self, part, after=0.0):
        """The latency that `part` of the requests kept to, of those that were due `after` seconds from the beginning or later."""
        values = sorted(seconds for due, seconds in self.latencies if due >= self.began + after)
        return values[min(int(part * len(values)), len(values) - 1)] if values else float("nan")


class Prometheus:
    """A Prometheus that scrapes one server every second."""

    def __init__(self, path, address):
        self.folder = tempfile.TemporaryDirectory(prefix="concertina-prometheus-", ignore_cleanup_errors=True)
        folder = pathlib.Path(self.folder.name)
        scrape = {"job_name": "concertina", "static_configs": [{"targets": [address]}]}
        (folder / "prometheus.yaml").write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
        self.address = f"127.0.0.1:{free_port()}"
        self.process = subprocess.Popen([path, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
                                         f"--web.listen-address={self.address}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: self.holds("up == 1"), "Prometheus scrapes")

    def holds(self, expression):
        """Whether an expression has any series now, as an alert asks."""
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(json.load(answer)["data"]["result"])
        except OSError:
            return False

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


def expressions():
    """The alerts' expressions by name, with windows that fit steps of seconds."""
    text = (ROOT / "config/prometheus/alerts.yaml").read_text()
    found = re.findall(r"- alert: (\w+)\n(?:\s+#.*\n)*\s+expr: (\|-\n(?:          .*\n)+|.*\n)", text)
    return {name: re.sub(r"\[\dm\]", "[5s]", " ".join(body.removeprefix("|-").split())) for name, body in found}


class Rehearsal:
    def __init__(self):
        self.server = Server(target_folder() / "concertina", MODEL, "--model-name", "costly", "--set", "model.instances=1",
                             "--set", f"model.max_batch_size={BATCH}", "--set", "scaling.window=5s")
        self.alerts, self.lines, self.faults = expressions(), [], []
        path = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
        self.prometheus = Prometheus(path, self.server.address) if path else None
        self.browser = Browser(executable()) if executable() else None

    def saturation(self):
        return self.server.metric("concertina_saturation_pod")

    def holding(self):
        return [name for name, text in self.alerts.items() if self.prometheus and self.prometheus.holds(text)]

    def events(self):
        return self.browser.run("[...document.querySelectorAll('#events li')].map(li => li.textContent).reverse().join('\\n')") if self.browser else ""

    def check(self, holds, what):
        self.lines.append(f"- {'holds' if holds else '**does not hold**'}: {what}")
        self.faults += [] if holds else [what]

    def steps(self):
        warm = Load(self.server.address, 20)
        time.sleep(5)
        warm.end()
        capacity = self.server.metric("concertina_capacity_rows_per_second")
        promise = 3e3 * BATCH / capacity
        self.lines += [f"Capacity as the server measured it: {capacity:.0f} rows/s. Three full batches take {promise:.0f} ms.", "",
                       f"p50 and p99 are of what was due after the first {BEGINNING:.0f} s of a step.", "",
                       "| part of it offered | saturation | p50 ms | p99 ms | longest of all, ms | refused | expressions that hold |",
                       "|---:|---:|---:|---:|---:|---:|---|"]
        seen = []
        for part in PARTS:
            load = Load(self.server.address, part * capacity / ROWS)
            time.sleep(STEP)
            saturation, holding = self.saturation(), self.holding()
            load.end()
            p50, p99, longest = (1e3 * load.quantile(*which) for which in ((0.5, BEGINNING), (0.99, BEGINNING), (1.0,)))
            seen.append((part, saturation, p99))
            self.lines.append(f"| {part} | {saturation:.2f} | {p50:.0f} | {p99:.0f} | {longest:.0f} | {load.refused} | {', '.join(holding)} |")
            self.faults += [f"{load.wrong} wrong answers"] if load.wrong else []
            time.sleep(6)
        first = next((part for part, saturation, _ in seen if saturation > TARGET), None)
        late = next((part for part, _, p99 in seen if p99 > promise), None)
        self.lines.append("")
        self.check(first is not None and (late is None or first < late),
                   f"saturation passes {TARGET} in an earlier step ({first}) than the p99 passes three full batches ({late})")
        return capacity

    def squeeze(self, capacity):
        if self.browser:
            self.browser.open(f"http://{self.server.address}/")
        load = Load(self.server.address, 0.3 * capacity / ROWS)
        time.sleep(8)
        before = self.saturation()
        self.server.memory(limit="40MiB")
        begin = time.monotonic()
        wait_until(lambda: self.saturation() > 1, "saturation passes 1", 20)
        seen = time.monotonic() - begin
        slow = [due + seconds - begin for due, seconds in list(load.latencies) if due > begin - 5 and seconds > 1]
        self.check(before < 1, f"saturation is below 1 before the squeeze ({before:.2f})")
        self.check(not slow, f"saturation passed 1 after {1e3 * seen:.0f} ms, before any answer took longer than a second")
        if self.prometheus:
            name = "ConcertinaMemoryShort"
            wait_until(lambda: name in self.holding(), f"{name} holds", 30)
            self.check(True, f"the expression of {name} held; with it: {', '.join(self.holding())}")
        if self.browser:
            wait_until(lambda: "memory makes batches smaller" in self.events(), "the page says so", 30)
            self.check(True, "the page said that memory makes batches smaller")
        self.server.memory(limit="auto")
        load.end()
        wait_until(lambda: self.saturation() < 1, "saturation falls", 60)
        if self.prometheus:
            wait_until(lambda: "ConcertinaMemoryShort" not in self.holding(), "the expression no longer holds", 60)
        if self.browser:
            wait_until(lambda: "memory no longer makes batches smaller" in self.events(), "the page says that it has passed", 60)
        self.check(load.wrong == 0 and load.refused == 0, f"{len(load.latencies)} answers meanwhile, {load.refused} refused, {load.wrong} wrong")
        self.lines += ["", "What the page said, from the beginning:", "", "```", self.events(), "```"] if self.browser else []

    def stop(self):
        if self.browser:
            self.browser.close()
        if self.prometheus:
            self.prometheus.stop()
        self.server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/acceptance.md"))
    output = parser.parse_args().output
    rehearsal = Rehearsal()
    missing = [name for name, there in (("Prometheus", rehearsal.prometheus), ("Chromium", rehearsal.browser)) if not there]
    rehearsal.lines += ["# Start, load, squeeze", "", f"`load-tests/acceptance.py`. {machine()}", ""]
    rehearsal.lines += [f"Skipped, not there: {', '.join(missing)}.", ""] if missing else []
    try:
        capacity = rehearsal.steps()
        rehearsal.lines += ["", "A squeeze to 40 MiB at 0.3 of the capacity:", ""]
        rehearsal.squeeze(capacity)
    finally:
        rehearsal.stop()
        text = "\n".join(rehearsal.lines) + "\n"
        print(text)
    pathlib.Path(output).write_text(text)
    sys.exit("; ".join(rehearsal.faults) if rehearsal.faults else 0)


if __name__ == "__main__":
    main()
