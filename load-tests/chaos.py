#!/usr/bin/env python3
"""Two minutes of disorder: the memory limit changes every 50 ms, requests have random row counts, clients cut connections.

Ends with every request accounted for: answered right, given up by its client, or nothing; the queue empty, nothing in
flight, run memory given back. Prints and writes load-tests/results/chaos.md, and exits 1 if something is missing.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import time

from common import ROOT, Server, machine, resident_mib, target_folder


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/chaos.md"))
    arguments = parser.parse_args()
    folder, dice = target_folder(), random.Random(arguments.seed)
    server = Server(folder / "concertina", "tests/models/wide", "--model-name", "wide", "--set", "model.max_batch_size=64",
                    "--set", "model.knee_tolerance=0", "--set", "model.instances=2", "--set", "model.intra_op_threads=1")
    ledger = lambda: server.memory()["devices"][0]
    runs = lambda: [arena for arena in ledger()["arenas"] if arena["kind"] == "run"]
    fixed = sum(arena["reserved"] for arena in ledger()["arenas"] if arena["kind"] != "run")
    # From one row on one instance, rounded up to whole granules, to everything that two largest batches need.
    least, most = fixed + (8 << 20), fixed + 2 * 64 * (3 << 20)
    command = [folder / "examples/loadgen", "--address", server.address, "--case", "wide", "--connections", "64", "--rows", "16",
               "--mixed-rows", "--cut-per-mille", "50", "--seconds", str(arguments.seconds)]
    load = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    changes = 0
    while load.poll() is None:
        # As often small as large: the logarithm is uniform.
        server.memory(limit=int(least * (most / least) ** dice.random()))
        changes += 1
        time.sleep(0.05)
    result = json.loads(load.communicate()[0])
    server.memory(limit="auto")
    empty = wait_for(lambda: server.metric("concertina_queue_rows", model="wide") == 0
                     and server.metric("concertina_requests_in_flight") <= 1)
    given_back = wait_for(lambda: all(arena["reserved"] == 0 and arena["allocated"] == 0 for arena in runs()))
    batches = {outcome: int(server.metric("concertina_batches_total", model="wide", outcome=outcome))
               for outcome in ("done", "out_of_memory", "failed", "instance_lost")}
    buckets = {edge: server.metric("concertina_estimate_ratio_bucket", model="wide", of="bytes", le=edge) for edge in ("0.95", "1", "+Inf")}
    runs_counted = buckets["+Inf"] or 1
    over, under = buckets["0.95"] / runs_counted, 1 - buckets["1"] / runs_counted
    rejections = int(server.metric("concertina_rejections_total", model="wide"))
    resident = resident_mib(server.process.pid)
    server.stop()
    holds = not result["errors"] and not result["wrong"] and empty and given_back and not rejections
    text = "\n".join([
        "# Two minutes of disorder", "", machine() + "  ",
        f"Command: `load-tests/chaos.py --seconds {arguments.seconds:.0f} --seed {arguments.seed}`.", "",
        "| what | number |", "|---|---|",
        f"| changes of the limit, between {least / 2**20:.0f} and {most / 2**20:.0f} MiB | {changes} |",
        f"| requests answered, each compared with its own answer | {result['requests']} |",
        f"| rows in them | {result['rows']} |", f"| requests given up by their clients | {result['cut']} |",
        f"| failed requests | {result['errors']} |", f"| wrong answers | {result['wrong']} |",
        f"| refused by the scheduler | {rejections} |", f"| batches done | {batches['done']} |",
        f"| batches that found no memory and ran again in halves | {batches['out_of_memory']} |",
        f"| batches predicted more than 5% too many bytes | {over:.3%} |", f"| batches predicted too few bytes | {under:.3%} |",
        f"| batches failed, instances lost | {batches['failed']}, {batches['instance_lost']} |",
        f"| queue and requests in flight empty at the end | {empty} |",
        f"| run memory all given back | {given_back} |", f"| resident at the end, MiB | {resident:.0f} |", "",
        "" if not result["first_error"] else f"First error: {result['first_error']}\n",
    ])
    print(text)
    pathlib.Path(arguments.output).write_text(text)
    if not holds:
        sys.exit("something is not accounted for")


if __name__ == "__main__":
    main()
