#!/usr/bin/env python3
"""How long /v2/health/live takes while the server has all the texts that it can take, and while it has none.

Clients in a process of their own post texts of 8 to 256 tokens (log-normal, median 32) to /v1/embeddings as fast as they are
answered; another process asks for health over one connection, 200 times a second. Goal: p99 at most 20 ms on two cores.
Prints and writes load-tests/results/text_health.md, and exits 1 if the goal is missed or a request failed.
"""
import argparse
import http.client
import json
import multiprocessing
import pathlib
import random
import sys
import threading
import time

from common import ROOT, Server, machine, target_folder

GOAL = 0.020
WORDS = "the accordion expands and contracts with the bellows of a free reed instrument from the old town".split()


def text(dice):
    """About as many words as the distribution has tokens; some are two, and 256 tokens are what the model takes."""
    count = min(220, max(6, round(dice.lognormvariate(3.4657, 0.7))))
    return " ".join(dice.choice(WORDS) for _ in range(count))


def load(address, clients, texts, seconds, results):
    """Posts until the time is over; puts the texts that were embedded, and the requests that failed."""
    end, done, failed = time.monotonic() + seconds, [0] * clients, [0] * clients

    def client(number):
        dice = random.Random(number)
        bodies = [json.dumps({"model": "minilm", "input": [text(dice) for _ in range(texts)]}) for _ in range(16)]
        connection = http.client.HTTPConnection(address, timeout=60)
        while time.monotonic() < end:
            connection.request("POST", "/v1/embeddings", dice.choice(bodies))
            response = connection.getresponse()
            response.read()
            if response.status == 200:
                done[number] += texts
            else:
                failed[number] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((sum(done), sum(failed)))


def probe(address, seconds, results):
    """Seconds that each question for health took, asked at fixed times, so that a slow answer does not spare the next ones."""
    connection = http.client.HTTPConnection(address, timeout=60)
    begin, took = time.monotonic(), []
    for number in range(int(seconds * 200)):
        due = begin + number / 200
        time.sleep(max(0.0, due - time.monotonic()))
        connection.request("GET", "/v2/health/live")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            sys.exit(f"health answered {response.status}")
        took.append(time.monotonic() - due)
    results.put(sorted(took))


def measure(address, clients, texts, seconds):
    """Sorted health times, texts per second and failures under this load; no clients: no load."""
    queue, times = multiprocessing.Queue(), multiprocessing.Queue()
    loading = multiprocessing.Process(target=load, args=(address, clients, texts, seconds + 2, queue)) if clients else None
    if loading:
        loading.start()
        time.sleep(1)
    probing = multiprocessing.Process(target=probe, args=(address, seconds, times))
    probing.start()
    took = times.get()
    probing.join()
    done, failed = queue.get() if loading else (0, 0)
    if loading:
        loading.join()
    return took, done / (seconds + 2), failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/text_health.md"))
    arguments = parser.parse_args()
    server = Server(target_folder() / "concertina", "models/minilm")
    rows, missed = [], []
    for clients, texts in ((0, 0), (64, 1), (16, 32), (4, 512)):
        took, rate, failed = measure(server.address, clients, texts, arguments.seconds)
        at = lambda part: took[min(len(took) - 1, int(part * len(took)))] * 1000
        rows.append(f"| {clients} | {texts} | {rate:.0f} | {failed} | {at(0.5):.1f} | {at(0.99):.1f} | {took[-1] * 1000:.1f} |")
        if failed or at(0.99) > GOAL * 1000:
            missed.append(f"{clients} clients with {texts} texts: p99 {at(0.99):.1f} ms, {failed} failed")
    server.stop()
    report = [
        "# Health while texts are embedded", "",
        "Written by `python3 load-tests/text_health.py`. Clients post texts of 8 to 256 tokens (log-normal, median 32) to",
        "/v1/embeddings as fast as they are answered, from a process on the same machine; /v2/health/live is asked 200 times a",
        f"second for {arguments.seconds:.0f} s. Goal: p99 at most {GOAL * 1000:.0f} ms.", "",
        "| clients | texts in a request | texts/s | failed | health p50, ms | p99, ms | longest, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |", *rows, "",
        "Missed: " + "; ".join(missed) + "." if missed else "The goal is met in every row.", "", machine(), "",
    ]
    print("\n".join(report))
    pathlib.Path(arguments.output).write_text("\n".join(report))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
