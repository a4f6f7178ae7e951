#!/usr/bin/env python3
"""A squeeze rehearsed on the host: the memory limit steps down and up again under saturating load.

For each model, in one run: the adaptive server and every static batch size take turns at every limit (the oracle is the best
of those that fit, chosen by the other rounds than the one it is compared in, since the luckiest of many noisy ones is not
the best); then the adaptive server alone while the limit steps 100% -> 50 -> 25 -> 12 -> 6 -> 100%. The limit is what the model always needs (weights,
buffers) plus a part of the run memory of its largest batch on every instance. Prints the table, writes it to
load-tests/results/squeeze.md (--output), and exits 1 if something does not hold.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

from common import ROOT, Server, Turns, machine, quartiles, resident_mib, target_folder

LEVELS = [1.0, 0.5, 0.25, 0.12, 0.06, 1.0]
# Model folder, case of the load generator, largest batch, sizes tried as static ones, rows of a request: enough that the
# model and not the load generator is what is measured.
MODELS = {
    "wide": ("tests/models/wide", "wide", 64, [1, 2, 4, 8, 16, 32, 64], 8),
    "minilm": ("models/minilm", "minilm:64", 32, [1, 2, 4, 8, 16, 32], 1),
}


class Run:
    """A server with one model, its instances fixed, so that only the batch size is left to choose."""

    def __init__(self, arguments, folder, name, batch, knee):
        models, self.case, _, _, self.rows = MODELS[name]
        flags = ["--set", f"model.max_batch_size={batch}", "--set", f"model.knee_tolerance={knee}",
                 "--set", "model.instances=2", "--set", "model.intra_op_threads=1", "--set",
                 "model.warmup.seconds=0.5", "--model-name", name]
        self.arguments, self.folder, self.name = arguments, folder, name
        self.server = Server(folder / "concertina", models, *flags)

    def ledger(self):
        return self.server.memory()["devices"][0]

    def fixed(self):
        """Bytes that are there between runs, whatever the load."""
        return sum(arena["reserved"] for arena in self.ledger()["arenas"] if arena["kind"] != "run")

    def command(self):
        return [str(part) for part in (self.folder / "examples/loadgen", "--address", self.server.address, "--case", self.case,
                                       "--connections", self.arguments.connections, "--rows", self.rows)]

    def load(self, seconds):
        return subprocess.Popen(self.command() + ["--seconds", str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True)


# Small enough that loading runs it, whatever batches pay.
PROBED = 4


def bytes_per_row(run):
    """Run memory of one instance of a server whose largest batch is `PROBED` rows, by the arenas' own peaks, per row."""
    return max(arena["peak_active"] for arena in run.ledger()["arenas"] if arena["kind"] == "run") / PROBED


def paired(arguments, folder, name, limits, per_row):
    """Rows per second of each round, of the adaptive server and of each static batch size that fits, at each limit.

    All servers are up at once and take turns, since this kind of machine drifts by more than what is to be seen.
    """
    largest, sizes = MODELS[name][2], MODELS[name][3]
    runs = {"adaptive": Run(arguments, folder, name, largest, 0.03)} | {size: Run(arguments, folder, name, size, 0) for size in sizes}
    generators = {key: Turns(*run.command(), ready=True) for key, run in runs.items()}
    table = {}
    try:
        for level, limit in limits.items():
            rates = {key: [] for key in runs if key == "adaptive" or runs[key].fixed() + key * per_row <= limit}
            for key in rates:
                runs[key].server.memory(limit=int(limit))
            for turn in range(arguments.rounds + 1):
                for key in rates if turn % 2 else reversed(rates):
                    result = generators[key].turn(arguments.static_seconds)
                    if result["errors"] or result["wrong"]:
                        sys.exit(f"{name}, {key} at {level:.0%}: {result['first_error']}")
                    # The first turn at a limit is there to get used to it.
                    if turn:
                        rates[key].append(result["rows_per_second"])
            table |= {(key, level): values for key, values in rates.items()}
    finally:
        for key, run in runs.items():
            generators[key].stop()
            run.server.stop()
    return table


def against_best(table, level):
    """Rows/s of the adaptive server, the best static batch, its rows/s, and the quartiles of the ratio over the rounds."""
    adaptive = table[("adaptive", level)]
    static = {batch: rates for (batch, at), rates in table.items() if at == level and batch != "adaptive"}
    ratios = []
    for turn, rate in enumerate(adaptive):
        others = lambda rates: statistics.median(rates[:turn] + rates[turn + 1:])
        best = max(static, key=lambda batch: others(static[batch]))
        ratios.append(rate / static[best][turn])
    best = max(static, key=lambda batch: statistics.median(static[batch]))
    return statistics.median(adaptive), best, statistics.median(static[best]), quartiles(ratios)


def adaptive(arguments, folder, name, limits_of):
    """The stepping run: rows of each tenth of a second, batch sizes after the return, resident set against ledger."""
    run = Run(arguments, folder, name, MODELS[name][2], 0.03)
    server, step = run.server, arguments.step_seconds
    try:
        limits = limits_of(run)
        # What the process needs outside the ledger is what it has once it has served for a while: buffers of connections, the heap, which grows for some seconds.
        run.load(10).communicate()
        time.sleep(2.5)
        idle = run.ledger()
        outside = resident_mib(server.process.pid) - idle["committed"] / 2**20
        server.memory(limit=int(limits[0]))
        load = run.load(step * len(LEVELS))
        time.sleep(0.5)
        begin, gaps, returned = time.monotonic(), [], []
        for index, limit in enumerate(limits):
            server.memory(limit=int(limit))
            end = begin + step * (index + 1) - (1.0 if index == len(limits) - 1 else 0)
            if index == len(limits) - 1:
                returned = batch_sizes(server, name, 6)
            if index == 0:
                time.sleep(step / 2)
                before = batch_sizes(server, name, 6)
            while time.monotonic() < end:
                resident, ledger = resident_mib(server.process.pid), run.ledger()
                gaps.append((resident - ledger["committed"] / 2**20 - outside) / resident)
                time.sleep(0.25)
        result = json.loads(load.communicate()[0])
        time.sleep(2.5)
        after = run.ledger()
        idle_reserved = sum(arena["reserved"] for arena in after["arenas"] if arena["kind"] == "run")
        alive = server.process.poll() is None
    finally:
        server.stop()
    return dict(result=result, gaps=gaps, before=before, returned=returned, alive=alive, idle_run_bytes=idle_reserved, outside=outside)


def batch_sizes(server, name, fifths):
    """Mean batch sizes of so many fifths of a second."""
    means, before = [], None
    for _ in range(fifths):
        now = [server.metric(f"concertina_batch_rows_{kind}", model=name) for kind in ("sum", "count")]
        if before and now[1] > before[1]:
            means.append((now[0] - before[0]) / (now[1] - before[1]))
        before = now
        time.sleep(0.2)
    return means


def squeeze(arguments, folder, name):
    probe = Run(arguments, folder, name, PROBED, 0)
    json.loads(probe.load(2).communicate()[0])
    per_row, fixed, instances = bytes_per_row(probe), probe.fixed(), 2
    probe.server.stop()
    run_bytes = per_row * MODELS[name][2] * instances
    limits = {level: fixed + level * run_bytes for level in sorted(set(LEVELS), reverse=True)}
    table = paired(arguments, folder, name, limits, per_row)
    stepped = adaptive(arguments, folder, name, lambda run: [limits[level] for level in LEVELS])
    rows = []
    for level, limit in limits.items():
        rows.append((level, limit, *against_best(table, level)))
    return dict(name=name, rows=rows, table=table, per_row=per_row, fixed=fixed, **stepped)


def render(arguments, results):
    lines = ["# A squeeze rehearsed on the host", "", machine() + "  ",
             f"Command: `load-tests/squeeze.py {' '.join(sys.argv[1:])}`; {arguments.connections} connections, closed loop, every answer checked; "
             "two instances of one thread. Rates: all servers up, taking turns of "
             f"{arguments.static_seconds} s, {arguments.rounds} rounds; the ratio is of the turns of one round: median (quartiles). Steps: 100, 50, 25, 12, 6, 100% every "
             f"{arguments.step_seconds} s under one unbroken load.", ""]
    for r in results:
        lines += [f"## {r['name']}: {r['per_row'] / 2**20:.2f} MiB of run memory a row, {r['fixed'] / 2**20:.1f} MiB always", "",
                  "| limit | MiB | rows/s | best static batch | its rows/s | ratio |", "|---|---|---|---|---|---|"]
        for level, limit, rate, batch, best, ratio in r["rows"]:
            lines.append(f"| {level:.0%} | {limit / 2**20:.1f} | {rate:.0f} | {batch} | {best:.0f} | "
                         f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f}) |")
        gaps = sorted(abs(gap) for gap in r["gaps"])
        means, before = (", ".join(f"{mean:.1f}" for mean in r[key]) for key in ("returned", "before"))
        lines += ["", f"Steps: failed requests {r['result']['errors']}, wrong answers {r['result']['wrong']}, process alive: {r['alive']}. Mean "
                  f"batch per 0.2 s before the squeeze: {before}; after the limit's return: {means}. Resident set less ledger less the {r['outside']:.0f} MiB outside at "
                  f"idle: median {gaps[len(gaps) // 2]:.1%}, p95 {gaps[int(len(gaps) * 0.95)]:.1%} of the resident set. Run memory 2.5 s "
                  f"after the load's end: {r['idle_run_bytes']} bytes.", ""]
        batches, levels = sorted({batch for batch, _ in r["table"]} - {"adaptive"}), sorted({level for _, level in r["table"]}, reverse=True)
        lines += ["| static batch | " + " | ".join(f"{level:.0%}" for level in levels) + " |", "|---" * (len(levels) + 1) + "|"]
        for batch in batches:
            cells = [f"{statistics.median(rates):.0f}" if (rates := r["table"].get((batch, level))) else "does not fit" for level in levels]
            lines.append(f"| {batch} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="wide,minilm")
    parser.add_argument("--connections", type=int, default=128)
    parser.add_argument("--step-seconds", type=float, default=10)
    parser.add_argument("--static-seconds", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/squeeze.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    results = [squeeze(arguments, folder, name) for name in arguments.models.split(",")]
    text = render(arguments, results)
    print(text)
    pathlib.Path(arguments.output).write_text(text + "\n")
    bad = [r["name"] for r in results if r["result"]["errors"] or r["result"]["wrong"] or not r["alive"]]
    if bad:
        sys.exit(f"failed requests or a dead process: {', '.join(bad)}")


if __name__ == "__main__":
    main()
