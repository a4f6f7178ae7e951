#!/usr/bin/env python3
"""Who fails how when memory is short: each server in a control group, started anew at each limit, under the same load.

  $PEERS_HOME/venv/base/bin/python load-tests/peers_squeeze.py     needs root, a writable memory controller, and what peers.py needs

The load is a closed loop of wrk, minilm, one row of 256 tokens a request: a batch of 64 rows needs about 0.8 GiB. A limit is to a
server what `docker run --memory` is. The kernel's count of killed processes tells who was killed; whoever still answers afterwards is asked
once more. Nothing is restarted between: an orchestrator would, and the requests of that time would be lost as well. Servers other than
ours have a largest batch of 64, as in peers.py.
Writes load-tests/results/peers_squeeze.md.
"""
import argparse
import json
import os
import pathlib
import signal
import sys
import time

from ceiling import Group
from common import ROOT, machine, target_folder
from peers import PEERS, Peer, VERSIONS, bodies, load, ready, start

MIB = 1 << 20


class Limited(Group):
    """The same, with what the kernel says of kills."""

    def kills(self):
        for name in ("memory.events", "memory.oom_control"):
            if (self.path / name).exists():
                found = dict(line.split() for line in (self.path / name).read_text().splitlines())
                return int(found["oom_kill"])
        raise RuntimeError("this kernel does not count kills")

    def peak(self):
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (self.path / name).exists():
                return int((self.path / name).read_text())
        return 0

    def empty(self):
        """Ends what is still there, and waits for it."""
        end = time.monotonic() + 20
        while (pids := (self.path / "cgroup.procs").read_text().split()) and time.monotonic() < end:
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.1)
        self.remove()


def trial(name, arguments, layout, port, limit, files):
    """What became of one server under one limit: a dict with what the table needs."""
    group, peer = Limited(limit * MIB), None
    body = files["bentoml" if name == "bentoml" else "json"]
    found = dict(peer=name, limit=limit)
    try:
        peer = Peer(name, arguments, layout, port, before=group.enter())
        try:
            peer.wait(body)
            ready(peer)
        except RuntimeError:
            return found | dict(fate="did not start", kills=group.kills(), exit=peer.process.poll())
        result = load(peer, arguments.clients, arguments.seconds, body)
        try:
            peer.ask(body)
            answers = True
        except OSError:
            answers = False
        return found | result | dict(fate="served", kills=group.kills(), exit=peer.process.poll(), answers=answers, peak=group.peak())
    finally:
        if peer:
            peer.end()
        group.empty()


def tell(cell):
    """A cell of the table in words."""
    killed = f", {cell['kills']} processes killed" if cell["kills"] > 1 else ", killed" if cell["kills"] else ""
    if cell["fate"] == "did not start":
        return "does not start" + (killed or f", exit code {cell['exit']}" if cell["exit"] is not None else killed or ", no answer in time")
    rate = f"{cell['requests'] / cell['seconds']:.0f}/s, {cell['failed']} failed"
    after = "" if cell["answers"] else "; dead afterwards" if cell["exit"] is not None else "; answers nobody afterwards"
    return ("**" + rate + "**" if not cell["failed"] and not cell["kills"] and cell["answers"] else rate) + killed + after


def report(cells, arguments):
    names = [name for name in PEERS if any(cell["peer"] == name for cell in cells)]
    lines = ["# A limit of memory, and who fails how", "", machine() + "  ",
             f"Command: `load-tests/peers_squeeze.py` (see its head). {arguments.clients} connections for {arguments.seconds} s, minilm, rows of "
             f"{arguments.tokens} tokens, JSON. {VERSIONS} Cells: requests/s and failed requests (a request "
             "that is still waiting at the end is neither); bold: nothing failed, nothing was killed, and it still answers. What does not start is "
             "not tried with less.", "",
             "| limit, MiB | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    table = {(cell["peer"], cell["limit"]): tell(cell) for cell in cells}
    for limit in arguments.limits:
        lines.append(f"| {limit} | " + " | ".join(table.get((name, limit), "-") for name in names) + " |")
    return "\n".join(lines + [""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--limits", nargs="+", type=int, default=[4096, 2048, 1024, 768, 512, 384, 288])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/peers_squeeze.md"))
    arguments = parser.parse_args()
    arguments.model, arguments.binary = "minilm", target_folder() / "concertina"
    folder = start.HOME / "bodies" / "squeeze"
    folder.mkdir(parents=True, exist_ok=True)
    files, _ = bodies("minilm", arguments.tokens, folder)
    layouts = json.loads((ROOT / "load-tests/peers/layouts.json").read_text())
    cells, dead = [], set()
    for limit in arguments.limits:
        for index, name in enumerate(arguments.peers):
            if name in dead:
                continue
            layout = layouts.get(name, {}).get("default", [os.cpu_count(), 1, 0.001])
            cell = trial(name, arguments, layout, 21600 + 10 * index, limit, files)
            cells.append(cell)
            print(limit, name, tell(cell), flush=True)
            # What does not start does not start with less.
            if cell["fate"] == "did not start":
                dead.add(name)
    text = report(cells, arguments)
    pathlib.Path(arguments.output).write_text(text)
    print(text)
    ours = [cell for cell in cells if cell["peer"] == "concertina"]
    if any(cell["fate"] != "served" or cell["failed"] or cell["kills"] or not cell["answers"] for cell in ours):
        sys.exit("ours did not hold")


if __name__ == "__main__":
    main()
