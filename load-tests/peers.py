#!/usr/bin/env python3
"""Side by side with other servers: all are up at once, started one after the other; those whose turn it is not are stopped (SIGSTOP), rounds alternate.

Before each round the server has a second of the same load that is not measured: what it gave back while it was stopped is its own
again. After it, whatever the clients left behind is waited for: a server that computes answers that nobody waits for, and cannot be stopped,
must not take that time from the next one.

  export PEERS_HOME=FOLDER CONCERTINA_ONNXRUNTIME=$PWD/.setup/onnxruntime/libonnxruntime.so.1.31.1
  $PEERS_HOME/venv/base/bin/python load-tests/peers.py measure --model mlp --output FOLDER/mlp.json     one model, a few minutes
  $PEERS_HOME/venv/base/bin/python load-tests/peers.py report FOLDER/*.json       the table, into load-tests/results/peers.md

peers/install.sh fills PEERS_HOME. The load is wrk, closed loop, one row a request; before it, every server's answer to
the same row is compared with ours. A server's layout (instances x threads) and batching delay are given by --layouts, by
default as peers/layouts.json says, else 2 x 1 and 1 ms; they are not tuned for each server.
"""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

import numpy as np

from common import ROOT, machine, target_folder

sys.path.insert(0, str(ROOT / "load-tests/peers"))
import start  # noqa: E402

PEERS = ["concertina", "triton", "mlserver", "litserve", "mosec", "bentoml"]
PATIENCE = 90
# Below those that the kernel gives to clients.
FIRST_PORT = 21200
WARM_UP_SECONDS = 1
#: A server is through with what was left behind when its processes use hardly more of a core than before there was any load.
IDLE_PART = 0.15
IDLE_WINDOW = 0.3
VERSIONS = ("Triton 2.51.0 (nvidia-pytriton 0.7.0, Python backend), MLServer 1.7.1, LitServe 0.2.19, Mosec 0.9.8, BentoML 1.4.40, each with ONNX "
            "Runtime 1.31.1 and batches of up to 64 rows.")


def tensors(model, tokens):
    """One row of each input, the same for all servers."""
    random = np.random.default_rng(1)
    if model == "minilm":
        return {"input_ids": random.integers(1000, 20000, (1, tokens)), "attention_mask": np.ones((1, tokens), np.int64),
                "token_type_ids": np.zeros((1, tokens), np.int64)}
    if model == "magika":
        return {"bytes": random.integers(0, 256, (1, 2048)).astype(np.int32)}
    return {"x": random.random((1, 256)).astype(np.float32)}


def bodies(model, tokens, folder):
    """Files with the request in each form, and the length of the binary form's head."""
    kinds = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}
    arrays = tensors(model, tokens)
    entry = lambda name, array: {"name": name, "shape": list(array.shape), "datatype": kinds[str(array.dtype)]}
    # minilm has a second output, with a vector for each token, which nobody shall write.
    wanted = {"outputs": [{"name": start.SHAPES[model][1][0]}]}
    plain = {"inputs": [entry(name, array) | {"data": array.ravel().tolist()} for name, array in arrays.items()]} | wanted
    head = {"inputs": [entry(name, array) | {"parameters": {"binary_data_size": array.nbytes}} for name, array in arrays.items()],
            "parameters": {"binary_data_output": True}} | wanted
    head = json.dumps(head, separators=(",", ":")).encode()
    texts = {"json": json.dumps(plain, separators=(",", ":")).encode(),
             "bentoml": json.dumps({"bodies": [plain]}, separators=(",", ":")).encode(),
             "binary": head + b"".join(array.tobytes() for array in arrays.values())}
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return {name: folder / name for name in texts}, len(head)


class Peer:
    """One started server."""

    def __init__(self, name, arguments, layout, port, before=()):
        self.name, self.port = name, port
        instances, threads, delay = layout
        file = model_file(arguments.model)
        command, environment, folder, self.path = start.plan(
            name, arguments.model, file, port, instances, threads, delay, arguments.binary)
        self.log = open(folder / "log", "wb")
        self.process = subprocess.Popen([*before, *(str(part) for part in command)], env=environment, cwd=folder, stdout=self.log,
                                        stderr=self.log, start_new_session=True)

    def url(self):
        return f"http://127.0.0.1:{self.port}{self.path}"

    def ask(self, body, head=None):
        """The first output of one answer."""
        headers = {"Content-Type": "application/json" if head is None else "application/octet-stream"}
        if head is not None:
            headers["Inference-Header-Content-Length"] = str(head)
        request = urllib.request.Request(self.url(), body.read_bytes(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text, length = answer.read(), answer.headers.get("Inference-Header-Content-Length")
        if length:
            return np.frombuffer(text[int(length):], np.float32)
        found = json.loads(text)
        found = found[0] if isinstance(found, list) else found
        return np.array(found["outputs"][0]["data"], np.float32)

    def wait(self, body):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                return self.ask(body)
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} did not become ready; see {self.log.name}")

    def cpu_seconds(self):
        """Of all processes of its group."""
        ticks = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(") ", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == self.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def used(self):
        """Cores in use."""
        before = self.cpu_seconds()
        time.sleep(IDLE_WINDOW)
        return (self.cpu_seconds() - before) / IDLE_WINDOW

    def wait_until_idle(self):
        end = time.monotonic() + PATIENCE
        while self.used() > self.resting + IDLE_PART:
            assert time.monotonic() < end, f"{self.name} does not become idle"

    def tell(self, what):
        # The processes of Triton's Python backend give each other up when one of them stops; idle, they cost next to nothing.
        if self.name != "triton" or what not in (signal.SIGSTOP, signal.SIGCONT):
            os.killpg(self.process.pid, what)

    def end(self):
        for what in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            try:
                self.tell(what)
            except ProcessLookupError:
                return
            if what == signal.SIGTERM:
                try:
                    self.process.wait(15)
                except subprocess.TimeoutExpired:
                    continue
                time.sleep(0.3)


def model_file(name):
    return start.HOME / f"models/{name}/model.onnx"


def load(peer, clients, seconds, body, head=None):
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--timeout", "60s", "-s", ROOT / "load-tests/peers/post.lua", peer.url(), "--", body]
    command += [head] if head is not None else []
    found = subprocess.run([str(part) for part in command], capture_output=True, check=True, text=True, timeout=seconds + 120)
    return json.loads(found.stdout.splitlines()[-1])


def measure(arguments):
    folder = start.HOME / "bodies" / arguments.model
    folder.mkdir(parents=True, exist_ok=True)
    files, head = bodies(arguments.model, arguments.tokens, folder)
    layouts = json.loads(pathlib.Path(arguments.layouts).read_text())
    port, peers, refused = FIRST_PORT, {}, {}
    cells = []
    try:
        reference = None
        for index, name in enumerate(arguments.peers):
            given = layouts.get(name, {})
            layout = given.get(arguments.model, given.get("default", [os.cpu_count(), 1, 0.001]))
            # One after the other: ours measures what suits the machine while it starts.
            peer = peers[name] = Peer(name, arguments, layout, port + 10 * index)
            answer = peer.wait(files["bentoml" if name == "bentoml" else "json"])
            reference = answer if reference is None else reference
            assert np.allclose(answer, reference, atol=1e-4), f"{name} answers something else"
            ready(peer)
            peer.resting = statistics.median(peer.used() for _ in range(3))
            peer.tell(signal.SIGSTOP)
        forms = {name: [form for form in arguments.forms if form == "json" or name in start.BINARY] for name in peers}
        for name, peer in peers.items():
            peer.tell(signal.SIGCONT)
            if "binary" in forms[name]:
                try:
                    assert np.allclose(peer.ask(files["binary"], head), reference, atol=1e-4), f"{name}: binary differs"
                except OSError as error:
                    refused[name] = str(error)
                    forms[name].remove("binary")
            load(peer, 64, 1, files["bentoml" if name == "bentoml" else "json"])
            peer.tell(signal.SIGSTOP)
        for clients in arguments.clients:
            for form in arguments.forms:
                for round_ in range(arguments.rounds):
                    for name, peer in peers.items():
                        if form not in forms[name]:
                            continue
                        peer.tell(signal.SIGCONT)
                        time.sleep(0.1)
                        body = "bentoml" if name == "bentoml" else form
                        binary = head if form == "binary" else None
                        load(peer, clients, WARM_UP_SECONDS, files[body], binary)
                        peer.wait_until_idle()
                        result = load(peer, clients, arguments.seconds, files[body], binary)
                        peer.wait_until_idle()
                        peer.tell(signal.SIGSTOP)
                        cell = dict(model=arguments.model, peer=name, clients=clients, form=form, round=round_, **result)
                        cells.append(cell)
                        print(f"{arguments.model:8} {clients:4} {form:6} {name:10} {result['requests'] / result['seconds']:9.1f}/s  "
                              f"p50 {result['p50'] * 1e3:8.2f}  p99 {result['p99'] * 1e3:8.2f} ms  failed {result['failed']}", flush=True)
    finally:
        for peer in peers.values():
            peer.end()
    pathlib.Path(arguments.output).write_text(json.dumps(dict(machine=machine(), tokens=arguments.tokens, layouts=layouts, refused=refused,
                                                              seconds=arguments.seconds, cells=cells), indent=1))


def report(arguments):
    """The table of several measurements, and what it says."""
    found = [json.loads(pathlib.Path(name).read_text()) for name in arguments.files]
    cells = {}
    for cell in (cell for one in found for cell in one["cells"]):
        cells.setdefault((cell["model"], cell["form"], cell["clients"]), {}).setdefault(cell["peer"], []).append(cell)
    middle = lambda rounds: tuple(statistics.median(values) for values in (
        [one["requests"] / one["seconds"] for one in rounds], [one["p50"] * 1e3 for one in rounds], [one["p99"] * 1e3 for one in rounds]))
    lines = ["# Side by side with other servers", "", found[0]["machine"] + "  ",
             f"Command: `load-tests/peers.py` (see its head). wrk, closed loop, one row a request (minilm: {found[0]['tokens']} tokens), JSON or binary "
             f"tensors; all servers up, all but the one measured stopped, alternating rounds of {found[0]['seconds']} s, medians. {VERSIONS} "
             "Cells: rows/s (p50, p99 in ms); bold is the fastest; a dash: that server does not take binary tensors over HTTP.", ""]
    behind = []
    names = [name for name in PEERS if any(name in row for row in cells.values())]
    for model, form in sorted({key[:2] for key in cells}):
        lines += [f"## {model}, {form}", "", "| clients | " + " | ".join(names) + " | ours / best other |", "|---" * (len(names) + 2) + "|"]
        for key in sorted(key for key in cells if key[:2] == (model, form)):
            row = {name: middle(rounds) for name, rounds in cells[key].items()}
            failed = {name: sum(one["failed"] for one in rounds) for name, rounds in cells[key].items()}
            best = max(value[0] for value in row.values())
            text = []
            for name in names:
                if name not in row:
                    text.append("-")
                    continue
                rate, p50, p99 = row[name]
                shown = f"{rate:.0f} ({p50:.1f}, {p99:.1f})"
                text.append((f"**{shown}**" if rate == best else shown) + (f", {failed[name]} failed" if failed[name] else ""))
            other = max((value[0] for name, value in row.items() if name != "concertina"), default=float("nan"))
            ratio = row["concertina"][0] / other
            lines.append(f"| {key[2]} | " + " | ".join(text) + f" | {ratio:.2f} |")
            if ratio < 1:
                behind.append(f"{model}, {form}, {key[2]} clients: {ratio:.2f}")
        lines.append("")
    lines += [f"Behind in {len(behind)} of {len(cells)} cells" + (": " + "; ".join(behind) if behind else "") + ".", ""]
    refused = {name: why for one in found for name, why in one["refused"].items()}
    lines += [f"{name} on binary tensors: {why}." for name, why in refused.items()]
    used = {f"{peer}: {layout}" for one in found for peer, layout in one["layouts"].items()}
    lines += ["", "Instances, threads, batching delay in seconds where not 2, 1, 0.001: " + "; ".join(sorted(used)) + ".", ""]
    pathlib.Path(arguments.output).write_text("\n".join(lines))
    print("\n".join(lines))


def ready(peer):
    """Ours answers as soon as the model is there, and is measuring its layouts until it is ready."""
    if peer.name != "concertina":
        return
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{peer.port}/v2/health/ready", timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("not ready")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.add_argument("--model", required=True, choices=start.SHAPES)
    one.add_argument("--tokens", type=int, default=64)
    one.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    one.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64, 256])
    one.add_argument("--forms", nargs="+", default=["json", "binary"])
    one.add_argument("--rounds", type=int, default=2)
    one.add_argument("--seconds", type=int, default=4)
    one.add_argument("--layouts", default=str(ROOT / "load-tests/peers/layouts.json"))
    one.add_argument("--binary", default=None)
    one.add_argument("--output", required=True)
    one.set_defaults(run=measure)
    two = commands.add_parser("report")
    two.add_argument("files", nargs="+")
    two.add_argument("--output", default=str(ROOT / "load-tests/results/peers.md"))
    two.set_defaults(run=report)
    arguments = parser.parse_args()
    if arguments.run is measure and not arguments.binary:
        arguments.binary = target_folder() / "concertina"
    arguments.run(arguments)


if __name__ == "__main__":
    main()
