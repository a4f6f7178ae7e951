#!/usr/bin/env python3
"""256 concurrent clients for a minute: no error, every answer the one that belongs to its request, memory flat.

Writes load-tests/results/soak.md, and exits 1 if something does not hold.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import time

from common import ROOT, Server, machine, resident_mib, target_folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="magika")
    parser.add_argument("--models", default="models/magika")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/soak.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    name = arguments.case.split(":")[0]
    server = Server(folder / "concertina", arguments.models, "--model-name", name)
    command = [folder / "examples/loadgen", "--address", server.address, "--case", arguments.case, "--connections",
               str(arguments.connections), "--seconds", str(arguments.seconds), "--distinct", "256"]
    load = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    begin, resident = time.monotonic(), []
    while load.poll() is None:
        time.sleep(1)
        if time.monotonic() - begin > 10:
            resident.append(resident_mib(server.process.pid))
    result = json.loads(load.communicate()[0])
    server.stop()
    text = "\n".join([
        "# 256 clients", "", machine() + "  ",
        f"Command: `load-tests/soak.py`; {arguments.case}, {arguments.connections} connections, closed loop, {arguments.seconds:.0f} s, 256 "
        "distinct requests, each answer compared with the one that its request got alone.", "",
        "| requests | rows/s | errors | wrong answers | p50, ms | p99, ms | resident after 10 s: least, most, MiB |", "|---|---|---|---|---|---|---|",
        f"| {result['requests']} | {result['rows_per_second']:.0f} | {result['errors']} | {result['wrong']} | "
        f"{result['p50_seconds'] * 1e3:.0f} | {result['p99_seconds'] * 1e3:.0f} | {min(resident):.0f}, {max(resident):.0f} |", ""])
    print(text)
    pathlib.Path(arguments.output).write_text(text)
    if result["errors"] or result["wrong"]:
        sys.exit(f"first error: {result['first_error']}")


if __name__ == "__main__":
    main()
