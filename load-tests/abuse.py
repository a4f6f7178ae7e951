#!/usr/bin/env python3
"""A good client's rate while others misuse the server: 10,000 idle connections, 1,000 slow writers, and bad requests of every kind.

Turns of a good client (binary inferences, closed loop) alternate between a server that is left in peace and the same server
abused. Before that every bad request is sent by itself: its answer must be 4xx and name the field that is wrong. Writes
load-tests/results/abuse.md, and exits 1 if something does not hold. With --check only the bad requests are sent.
"""
import argparse
import copy
import http.client
import json
import multiprocessing
import pathlib
import random
import resource
import socket
import statistics
import sys
import time

from common import ROOT, Server, Turns, machine, quartiles, resident_mib, target_folder

INFER = "/v2/models/affine/infer"
LEAST_RATE = 0.9
# Idle and slow connections, their buffers in the server, and what a few bad requests hold at a time.
MOST_MORE_MIB = 512
GOOD = {
    "id": "a", "parameters": {"priority": 1, "timeout": 1000000, "binary_data_output": False},
    "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {}, "data": [1, 2, 3, 4]}],
    "outputs": [{"name": "y", "parameters": {"binary_data": False, "classification": 1}}],
}
WRONG = [True, False, 0, -1, 2.5, 1e300, 2 ** 70, "", "x", [], {}, [[]], [{}], {"x": 1}, None]


def places(value, path=()):
    """Every place in a JSON value but the whole, as the keys that lead there."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def replaced(path, value):
    """The good request with one value in the place of another."""
    request = copy.deepcopy(GOOD)
    at = request
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return request


def named(path):
    """Words of which an error about this place must have one: the field, or for an element the list that it is in."""
    return [key.removesuffix("s") for key in path if isinstance(key, str)][-2:]


def plain(body, headers=(), path=INFER, method="POST"):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    if not any(line.lower().startswith("content-length") for line in lines):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def bad_requests():
    """(what it is, the bytes, words of which the error must have one; None: anything may be said, or the request may even be good)."""
    for path in places(GOOD):
        for value in WRONG:
            yield f"{path} = {value!r}", plain(json.dumps(replaced(path, value)).encode()), named(path)
        request = copy.deepcopy(GOOD)
        at = request
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        yield f"{path} missing", plain(json.dumps(request).encode()), named(path)
    good = json.dumps(GOOD).encode()
    binary = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 10 ** 12}}]}
    head = json.dumps(binary).encode()
    shape = json.dumps(replaced(("inputs", 0, "shape"), [2 ** 40, 4])).encode()
    deep = "[" * 100_000
    yield "a body of a terabyte", plain(b"", ["Content-Length: 1000000000000"]), ["larger"]
    yield "a tensor of a terabyte", plain(head, [f"Inference-Header-Content-Length: {len(head)}"]), ["binary_data_size"]
    yield "a shape of a terabyte", plain(shape), ["shape", "rows"]
    yield "JSON of a terabyte", plain(good, ["Inference-Header-Content-Length: 1000000000000"]), ["Inference-Header-Content-Length"]
    yield "JSON of less than nothing", plain(good, ["Inference-Header-Content-Length: -1"]), ["Inference-Header-Content-Length"]
    yield "deep data", plain(good.replace(b"[1, 2, 3, 4]", deep.encode())), ["data"]
    yield "deep parameters", plain(good.replace(b'"priority": 1', b'"priority": ' + deep.encode())), ["priority"]
    yield "deep nonsense", plain(b'{"nonsense": ' + deep.encode()), ["nonsense", "request"]
    yield "no gzip", plain(good, ["Content-Encoding: gzip"]), ["gzip"]
    yield "an unknown coding", plain(good, ["Content-Encoding: br"]), ["br"]
    yield "predict with a wrong type", plain(b'{"instances": 7}', path="/v1/models/affine:predict"), ["instances"]


def ask(address, request):
    """Status and error text; None where the connection ended without an answer."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            body = response.read()
        except (http.client.HTTPException, OSError):
            return None, ""
    try:
        return response.status, json.loads(body).get("error", "")
    except (ValueError, AttributeError):
        return response.status, body.decode(errors="replace")


def check(address):
    """Each bad request by itself. Answers how many there were, by status, and what is wrong with their answers."""
    seen, faults = {}, []
    for what, request, words in bad_requests():
        status, text = ask(address, request)
        seen[status] = seen.get(status, 0) + 1
        if status == 200:
            continue  # Among the values that are tried some are right.
        if status is None or not 400 <= status < 500:
            faults.append(f"{what}: {status} {text}")
        elif not any(word.lower() in text.lower() for word in words):
            faults.append(f"{what}: none of {words} in {text!r}")
    return seen, faults


def idle(address, count, ready, stop):
    """Connections that send nothing, or half a head."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held = []
    for number in range(count):
        connection = socket.create_connection(address, timeout=60)
        if number % 2:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHo")
        held.append(connection)
    ready.set()
    stop.wait()
    alive = 0
    for connection in held:
        connection.setblocking(False)
        try:
            alive += connection.recv(1) != b""
        except BlockingIOError:
            alive += 1
        except OSError:
            pass
    stop.clear()
    print(f"idle connections still open at the end: {alive} of {count}", file=sys.stderr)


def slow(address, count, ready, stop):
    """Writers that send a byte of a body each second."""
    held = []
    for _ in range(count):
        connection = socket.create_connection(address, timeout=60)
        connection.sendall(plain(b"{", ["Content-Length: 100000"]))
        connection.setblocking(False)
        held.append(connection)
    ready.set()
    while not stop.is_set():
        for number in range(0, len(held), max(1, count // 10)):
            for connection in held[number:number + max(1, count // 10)]:
                try:
                    connection.send(b" ")
                except OSError:
                    pass
            time.sleep(0.1)


def rude(address, per_second, ready, stop):
    """Bad requests, and good ones cut at a random byte, at a steady rate."""
    chance = random.Random(1)
    requests = [request for _, request, _ in bad_requests()]
    good = plain(json.dumps(GOOD).encode())
    ready.set()
    due = time.monotonic()
    while not stop.is_set():
        due += 1 / per_second
        time.sleep(max(0, due - time.monotonic()))
        try:
            if chance.random() < 0.5:
                ask(address, chance.choice(requests))
            else:
                with socket.create_connection(address, timeout=30) as connection:
                    connection.sendall(good[:chance.randrange(len(good))])
                    if chance.random() < 0.5:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        except OSError:
            pass


class Abuse:
    """The abusers, each kind in a process of its own, at work until ended."""

    def __init__(self, address, arguments):
        self.stop, self.processes = multiprocessing.Event(), []
        for work, amount in ((idle, arguments.idle), (slow, arguments.slow), (rude, arguments.bad_per_second)):
            ready = multiprocessing.Event()
            process = multiprocessing.Process(target=work, args=(address, amount, ready, self.stop), daemon=True)
            process.start()
            if not ready.wait(300):
                sys.exit(f"{work.__name__} did not get its connections")
            self.processes.append(process)

    def end(self):
        self.stop.set()
        for process in self.processes:
            process.join(60)
            process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only send each bad request once")
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--slow", type=int, default=1_000)
    parser.add_argument("--bad-per-second", type=float, default=100)
    parser.add_argument("--connections", type=int, default=16, help="of the good client")
    parser.add_argument("--turns", type=int, default=5, help="of each kind")
    parser.add_argument("--seconds", type=float, default=3, help="of one turn")
    parser.add_argument("--output", default=str(ROOT / "load-tests/results/abuse.md"))
    arguments = parser.parse_args()
    folder = target_folder()
    server = Server(folder / "concertina", "tests/models/affine", "--model-name", "affine", "--set", "http.body_read_timeout=10m",
                    "--set", "http.header_read_timeout=10m", grpc="off")
    address = ("127.0.0.1", int(server.address.rsplit(":", 1)[1]))
    seen, faults = check(address)
    total = sum(seen.values())
    print(f"{total} bad requests: " + ", ".join(f"{status}: {count}" for status, count in sorted(seen.items(), key=str)))
    if arguments.check or faults:
        server.stop()
        sys.exit("\n".join(faults) if faults else 0)

    good = Turns(folder / "examples/loadgen", "--address", server.address, "--case", "affine", "--connections",
                 arguments.connections, ready=True)
    good.turn(arguments.seconds)
    before = resident_mib(server.process.pid)
    peace, abused, wrong, most, setup = [], [], 0, before, []
    for _ in range(arguments.turns):
        result = good.turn(arguments.seconds)
        peace.append(result["rows_per_second"])
        begun = time.monotonic()
        abuse = Abuse(address, arguments)
        setup.append(time.monotonic() - begun)
        result = good.turn(arguments.seconds)
        abused.append(result["rows_per_second"])
        wrong += result["errors"] + result["wrong"]
        most = max(most, resident_mib(server.process.pid))
        abuse.end()
        time.sleep(1)
    good.stop()
    ratio = statistics.median(b / a for a, b in zip(peace, abused))
    server.stop()
    rates = [" / ".join(f"{value:.0f}" for value in quartiles(rates)) for rates in (peace, abused)]
    text = "\n".join([
        "# Abuse", "", machine() + "  ",
        f"Command: `load-tests/abuse.py`; the model `affine`, {arguments.connections} good connections in a closed loop (binary, one row), "
        f"{arguments.turns} turns of {arguments.seconds:g} s each in peace and abused, alternating. Abusers: {arguments.idle} connections that are idle "
        f"or have sent half a head, {arguments.slow} writers of a byte a second, {arguments.bad_per_second:g} bad or cut requests a second; they run "
        "on the same cores as the server and the good client.", "",
        "| good requests/s in peace (quartiles) | abused | median ratio of neighbours | errors or wrong answers of the good client | "
        "resident before, most, MiB |",
        "|---|---|---|---|---|",
        f"| {rates[0]} | {rates[1]} | {ratio:.2f} | {wrong} | {before:.0f}, {most:.0f} |", "",
        f"{total} bad requests, each by itself: every answer was 4xx and named the field, or the value was good after all ("
        + ", ".join(f"{status}: {count}" for status, count in sorted(seen.items(), key=str)) + ").", ""])
    print(text)
    pathlib.Path(arguments.output).write_text(text)
    if ratio < LEAST_RATE or wrong or most - before > MOST_MORE_MIB:
        sys.exit(f"expected a ratio of {LEAST_RATE} at least, no error, and {MOST_MORE_MIB} MiB more at most")


if __name__ == "__main__":
    main()
