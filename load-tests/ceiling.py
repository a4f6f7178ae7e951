#!/usr/bin/env python3
"""A real ceiling: the server in a control group whose memory limit leaves room for 1.3 rows beyond what it always needs.

First the server runs under the same load with a generous limit, to learn what it always needs (process, weights, buffers, margin)
and what one row needs; then with exactly that and 1.3 rows. It must serve every request and never be killed. Needs root and a writable
memory controller (control groups v2 or v1). Prints and writes load-tests/results/ceiling.md.
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
        (self.path / self.limit_file).write_text(str(limit))

    def enter(self):
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "enter")

    def used(self):
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return int((self.path / self.used_file).read_text()) - cache

    def remove(self):
        self.path.rmdir()


def serve(folder, limit, seconds, connections):
    group = Group(limit)
    try:
        server = Server(folder / "concertina", "models/minilm", "--model-name", "minilm", "--set", "model.instances=1",
                        "--set", "model.intra_op_threads=2", "--set", "model.max_batch_size=16",
                        "--set", f"model.warmup.default_dim={TOKENS}", "--set", "models.cache=", before=group.enter())
        command = [folder / "examples/loadgen", "--address", server.address, "--case", f"{CASE}:{TOKENS}", "--connections",
                   str(connections), "--seconds", str(seconds), "--distinct", "8", "--output", "sentence_embedding"]
        result = json.loads(subprocess.run([str(part) for part in command], capture_output=True, check=True, text=True).stdout)
        # Between runs again: what the process has grown by in serving is what it always needs from now on.
        time.sleep(3)
        idle, used = server.memory()["devices"][0], group.used()
        alive = server.process.poll() is None
        rows, count = (server.metric(f"concertina_batch_rows_{kind}", model="minilm") for kind in ("sum", "count"))
        server.stop()
    finally:
        group.remove()
    return dict(idle=idle, used=used, result=result, alive=alive, mean=rows / max(count, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/ceiling.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    free = serve(folder, 4 << 30, 5, 16)
    run = next(arena for arena in free["idle"]["arenas"] if arena["kind"] == "run")
    row = run["peak_active"] / 16
    always = free["used"] - run["reserved"] + free["idle"]["margin"]
    # The margin of a small group is the smallest there is; that of the generous one was larger.
    always += min(free["idle"]["margin"], 16 << 20) - free["idle"]["margin"]
    limit = int(always + 1.3 * row)
    tight = serve(folder, limit, arguments.seconds, 16)
    text = "\n".join([
        "# A real ceiling", "", machine() + "  ",
        f"Command: `load-tests/ceiling.py`; minilm at {TOKENS} tokens, 16 connections, {arguments.seconds:.0f} s.", "",
        "| what | number |", "|---|---|",
        f"| one row, MiB | {row / 2**20:.1f} |", f"| always needed (process, weights, buffers, margin), MiB | {always / 2**20:.1f} |",
        f"| limit of the control group, MiB | {limit / 2**20:.1f} |", f"| requests answered | {tight['result']['requests']} |",
        f"| failed or wrong | {tight['result']['errors']}, {tight['result']['wrong']} |", f"| mean batch | {tight['mean']:.2f} |",
        f"| killed | {not tight['alive']} |", "",
        "" if not tight["result"]["first_error"] else f"First error: {tight['result']['first_error']}\n"])
    print(text)
    pathlib.Path(arguments.output).write_text(text)
    if not tight["alive"] or tight["result"]["errors"] or not tight["result"]["requests"]:
        sys.exit("it did not hold")


if __name__ == "__main__":
    main()
