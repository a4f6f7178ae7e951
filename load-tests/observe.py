#!/usr/bin/env python3
"""What it costs to look: a scrape, a scraper each second, and tracing, off and on.

For each model servers take turns under a closed-loop load from a separate process: as it is; with somebody who scrapes it once a
second; with tracing on, everything recorded and sent to a collector that throws it away; and with --baseline the binary of an
earlier commit. Ratios are of turns of one round. A scrape is timed alone on an idle server and under load. Writes
load-tests/results/observe.md (--output). The collector needs grpcio: PYTHONPATH=.setup/python3.11/tests (`make test-setup`).
"""
import argparse
import concurrent.futures
import http.client
import pathlib
import statistics
import sys
import threading
import time

import grpc

from common import ROOT, Server, Turns, cpu_seconds, machine, quartiles, target_folder

CASES = {"affine": ROOT / "tests/models/affine", "minilm:64": ROOT / "models/minilm"}
SCRAPES = 300


class Sink:
    """A collector that throws away what it gets, and counts the messages and their bytes."""

    def __init__(self):
        self.messages, self.bytes = 0, 0
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        call = grpc.unary_unary_rpc_method_handler(self.take, lambda data: data, lambda data: data)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "opentelemetry.proto.collector.trace.v1.TraceService", {"Export": call}),))
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def take(self, data, _):
        self.messages += 1
        self.bytes += len(data)
        return b""


class Scraper:
    """Asks for the metrics on one connection."""

    def __init__(self, address):
        self.connection = http.client.HTTPConnection(address, timeout=10)
        self.size = 0

    def scrape(self):
        """Seconds of one scrape."""
        begin = time.perf_counter()
        self.connection.request("GET", "/metrics")
        self.size = len(self.connection.getresponse().read())
        return time.perf_counter() - begin

    def every_second(self, ended):
        while not ended.wait(1.0):
            self.scrape()


def turn(server, load, seconds, scraper=None):
    """Rows per second and milliseconds of the processors per row."""
    ended = threading.Event()
    helper = threading.Thread(target=scraper.every_second, args=(ended,)) if scraper else None
    if helper:
        helper.start()
    before = cpu_seconds(server.process.pid)
    result = load.turn(seconds)
    used = cpu_seconds(server.process.pid) - before
    ended.set()
    if helper:
        helper.join()
    if result["errors"] or result["wrong"]:
        sys.exit(f"errors or wrong answers: {result}")
    return result["rows_per_second"], 1e3 * used / result["rows"]


def scrapes(server, scraper, count, pause=0.0):
    """Milliseconds of single scrapes, and of the processors for each."""
    before, seconds = cpu_seconds(server.process.pid), []
    for _ in range(count):
        seconds.append(1e3 * scraper.scrape())
        time.sleep(pause)
    return sorted(seconds), 1e3 * (cpu_seconds(server.process.pid) - before) / count


def measure(arguments, folder, case, models, sink):
    binary = folder / "concertina"
    servers = {"plain": Server(binary, models), "scraped": Server(binary, models),
               "traced": Server(binary, models, "--tracing-endpoint", sink.endpoint)}
    if arguments.baseline:
        servers["baseline"] = Server(arguments.baseline, models)
    try:
        loads = {name: Turns(folder / "examples/loadgen", "--address", server.address, "--case", case, "--connections",
                             arguments.connections, ready=True) for name, server in servers.items()}
        scraper = Scraper(servers["scraped"].address)
        scrapes(servers["scraped"], scraper, 20)
        idle, idle_cpu = scrapes(servers["scraped"], scraper, SCRAPES)
        rounds = []
        for number in range(arguments.rounds + 1):
            names = list(servers)
            # Whoever goes first one time goes last another time.
            names = names[number % len(names):] + names[:number % len(names)]
            found = {name: turn(servers[name], loads[name], arguments.seconds, scraper if name == "scraped" else None)
                     for name in names}
            # The first round warms all of them.
            if number:
                rounds.append(found)
        busy = threading.Thread(target=loads["scraped"].turn, args=(6,))
        busy.start()
        time.sleep(1)
        loaded, _ = scrapes(servers["scraped"], scraper, 100, 0.03)
        busy.join()
        outcomes = {outcome: servers["traced"].metric("concertina_trace_spans_total", outcome=outcome)
                    for outcome in ("exported", "dropped", "failed")}
        for load in loads.values():
            load.stop()
    finally:
        for server in servers.values():
            server.stop()
    return {"case": case, "rounds": rounds, "idle": idle, "idle_cpu": idle_cpu, "loaded": loaded, "size": scraper.size,
            "outcomes": outcomes}


def render(arguments, results):
    at = lambda values, part: values[min(int(part * len(values)), len(values) - 1)]
    three = lambda values: "{1:.3f} ({0:.3f} to {2:.3f})".format(*quartiles(values))
    lines = ["# What it costs to look", "", machine() + "  ",
             f"`load-tests/observe.py`: turns of {arguments.seconds:g} s, {arguments.rounds} rounds, {arguments.connections} connections, closed "
             "loop, one row a request. Ratios are of turns of one round: median (quartiles). Load, scraper and collector share the cores with the "
             "server; the processors' time is the server's alone.", "",
             "## A scrape", "", "| model | bytes | ms of the processors, idle | ms, idle: p50, p99 | ms, under load: p50, p99 |", "|---|---:|---:|---:|---:|"]
    for r in results:
        lines.append(f"| {r['case']} | {r['size']} | {r['idle_cpu']:.2f} | {at(r['idle'], 0.5):.2f}, {at(r['idle'], 0.99):.2f} | "
                     f"{at(r['loaded'], 0.5):.2f}, {at(r['loaded'], 0.99):.2f} |")
    lines += ["", "Under load a scrape waits for a core like anybody else; what it computes is the first number.", "",
              "## Throughput", "", "| model | turn | rows/s | ms of the processors per row | rows/s over plain | processors over plain |", "|---|---|---:|---:|---:|---:|"]
    for r in results:
        for name in sorted(r["rounds"][0], key=["plain", "scraped", "traced", "baseline"].index):
            rows = statistics.median(found[name][0] for found in r["rounds"])
            cpu = statistics.median(found[name][1] for found in r["rounds"])
            ratios = [three([found[name][part] / found["plain"][part] for found in r["rounds"]]) for part in (0, 1)]
            shown = ratios if name != "plain" else ["", ""]
            lines.append(f"| {r['case']} | {name} | {rows:.0f} | {cpu:.4f} | {shown[0]} | {shown[1]} |")
    lines += ["", "`plain`: nobody scrapes, tracing is off. `scraped`: the same, scraped once a second. `traced`: every request recorded and sent. Each "
              "is a process of its own, and two of one binary differ, too: what `scraped` differs from `plain` by is at least that."]
    if arguments.baseline:
        lines.append(f"`baseline`: {arguments.baseline_is}, nobody scrapes.")
    for r in results:
        lines += ["", f"Spans of {r['case']}: " + ", ".join(f"{value:.0f} {outcome}" for outcome, value in r["outcomes"].items()) + "."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--baseline", help="another binary, to compare with")
    parser.add_argument("--baseline-is", default="another binary", help="what that is")
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/observe.md"))
    arguments = parser.parse_args()
    sink, folder, results = Sink(), target_folder(), []
    for case in arguments.cases.split(","):
        results.append(measure(arguments, folder, case, CASES[case], sink))
        pathlib.Path(arguments.output).write_text(render(arguments, results))
    print(render(arguments, results))


if __name__ == "__main__":
    main()
