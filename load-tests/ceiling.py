#!/usr/bin/env python3
"""A real ceiling: the server in a control group whose memory limit leaves room for 1.3 rows beyond what it always needs.

Under a generous limit the server loads and serves for a while, which tells what it always needs (process, weights, buffers, margin) and
what one row needs; then its group gets exactly that and 1.3 rows. It must serve every request and never be killed. Parsing a model takes
more for a moment than serving it, so the smallest limit in which it loads is looked for as well: below, it must say so and stay. Needs root and
a writable memory controller (control groups v2 or v1). Prints and writes load-tests/results/ceiling.md.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from common import ROOT, Server, machine, target_folder

CASE, TOKENS = "minilm", 256


class Group:
    """A control group of our own."""

    def __init__(self, limit):
        v2 = pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists()
        self.path = pathlib.Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory") / f"concertina-ceiling-{os.getpid()}"
        self.path.mkdir(exist_ok=True)
        self.limit_file = "memory.max" if v2 else "memory.limit_in_bytes"
        self.used_file = "memory.current" if v2 else "memory.usage_in_bytes"
        self.limit(limit)

    def limit(self, limit):
        """Sets it; version 1 refuses one that is lower than what is in use, until the rest has been given back."""
        for _ in range(50):
            try:
                return (self.path / self.limit_file).write_text(str(limit))
            except OSError:
                time.sleep(0.1)
        sys.exit(f"more than {limit} bytes stay in use")

    def enter(self):
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "enter")

    def used(self):
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return int((self.path / self.used_file).read_text()) - cache

    def remove(self):
        self.path.rmdir()


OPTIONS = ("--model-name", "minilm", "--set", "model.instances=1", "--set", "model.intra_op_threads=2", "--set", "model.max_batch_size=16",
           "--set", f"model.warmup.default_dim={TOKENS}", "--set", "models.cache=")
GENEROUS = 4 << 30


def load(folder, server, seconds):
    command = [folder / "examples/loadgen", "--address", server.address, "--case", f"{CASE}:{TOKENS}", "--connections", "16", "--seconds",
               str(seconds), "--distinct", "8", "--output", "sentence_embedding"]
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    # The first refusal ends the generator when it only connects; that is a result, too.
    return json.loads(found.stdout) if found.returncode == 0 else dict(requests=0, errors=1, wrong=0, first_error=found.stderr[:300])


def batches(server):
    return [server.metric(f"concertina_batch_rows_{kind}", model="minilm") for kind in ("sum", "count")]


def one_row(folder):
    """Bytes of run memory that a single row needs, as `concertina profile` measures them."""
    command = [folder / "concertina", "profile", "minilm", "--models", "models/minilm", "--json", "--rows", "1", "--cache", "", *OPTIONS]
    found = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, check=True, text=True)
    return json.loads(found.stdout)["rows"][0]["observed_bytes"]


def squeeze(folder, row, seconds):
    """What the server needs, the limit that follows, and what it did within it."""
    group = Group(GENEROUS)
    server = None
    try:
        server = Server(folder / "concertina", "models/minilm", *OPTIONS, before=group.enter())
        load(folder, server, 5)
        # Between runs again: what the process has grown by in serving is what it always needs from now on.
        time.sleep(3)
        idle = server.memory()["devices"][0]
        run = next(arena for arena in idle["arenas"] if arena["kind"] == "run")
        # The margin of a small group is the smallest there is.
        always = group.used() - run["reserved"] + (16 << 20)
        limit = int(always + 1.3 * row)
        group.limit(limit)
        before = batches(server)
        result = load(folder, server, seconds)
        alive = server.process.poll() is None
        rows, count = (after - first for after, first in zip(batches(server), before)) if alive else (0, 0)
        return dict(always=always, limit=limit, result=result, alive=alive, mean=rows / max(count, 1))
    finally:
        if server:
            server.process.kill()
            server.process.wait()
        group.remove()


def loads(folder, limit):
    """Whether the server becomes ready within the limit: it does, or says why not; to be killed is neither."""
    group = Group(limit)
    command = [*group.enter(), folder / "concertina", "serve", "--models", "models/minilm", "--address", "127.0.0.1:0", "--grpc-address", "127.0.0.1:0",
               "--log-format", "json", *OPTIONS]
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "loading is over" in line:
                return json.loads(line)["ready"] == 1
        sys.exit(f"the server ended with {process.wait()} while it loaded in {limit >> 20} MiB")
    finally:
        process.kill()
        process.wait()
        group.remove()


def smallest(folder):
    """MiB in which it loads, to 8 MiB; every limit below is tried as well, down to half of it."""
    limits = range(96 << 20, 321 << 20, 8 << 20)
    good = [limit for limit in limits if loads(folder, limit)]
    return good[0] >> 20, all(limit in good for limit in limits if limit >= good[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/ceiling.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    least, steady = smallest(folder)
    row = one_row(folder)
    tight = squeeze(folder, row, arguments.seconds)
    text = "\n".join([
        "# A real ceiling", "", machine() + "  ",
        f"Command: `load-tests/ceiling.py`; minilm at {TOKENS} tokens, 16 connections, {arguments.seconds:.0f} s.", "",
        "| what | number |", "|---|---|",
        f"| one row, MiB | {row / 2**20:.1f} |", f"| always needed (process, weights, buffers, margin), MiB | {tight['always'] / 2**20:.1f} |",
        f"| smallest limit in which it loads (all from 96 to 320 MiB tried in steps of 8, refused or loaded, never killed), MiB | {least}{'' if steady else ', not every larger one'} |",
        f"| limit of the control group while serving, MiB | {tight['limit'] / 2**20:.1f} |", f"| requests answered | {tight['result']['requests']} |",
        f"| failed or wrong | {tight['result']['errors']}, {tight['result']['wrong']} |", f"| mean batch | {tight['mean']:.2f} |",
        f"| killed | {not tight['alive']} |", "",
        "" if not tight["result"]["first_error"] else f"First error: {tight['result']['first_error']}\n"])
    print(text)
    pathlib.Path(arguments.output).write_text(text)
    if not tight["alive"] or tight["result"]["errors"] or not tight["result"]["requests"]:
        sys.exit("it did not hold")


if __name__ == "__main__":
    main()
