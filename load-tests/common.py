"""What the measuring scripts share: the built programs, a started server, and what the kernel says of it."""
import json
import os
import pathlib
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
TICKS = os.sysconf("SC_CLK_TCK")


def target_folder():
    found = subprocess.run(["cargo", "metadata", "--format-version=1", "--no-deps", "--offline"], cwd=ROOT,
                           capture_output=True, check=True, text=True)
    return pathlib.Path(json.loads(found.stdout)["target_directory"]) / "release"


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Turns:
    """A measuring program that works for as many seconds as it is told, each time it is told, so that several can take turns.

    This kind of machine drifts by more than what is to be seen: only neighbouring turns can be compared.
    """

    def __init__(self, *command, ready=False):
        self.process = subprocess.Popen([str(part) for part in command] + ["--turns"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        if ready:
            self.line()

    def line(self):
        return self.process.stdout.readline() or sys.exit(f"{self.process.args[0]} ended")

    def turn(self, seconds):
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def quartiles(values):
    """Lower quartile, median, upper quartile."""
    values = sorted(values)
    return [values[min(len(values) - 1, round(part * (len(values) - 1)))] for part in (0.25, 0.5, 0.75)]


def resident_mib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A started server; ready when the constructor returns."""

    TOKEN = "rehearsal"

    def __init__(self, binary, models, *flags, before=(), grpc="127.0.0.1:0"):
        self.address = f"127.0.0.1:{free_port()}"
        self.log = open("/tmp/concertina-bench.log", "ab")
        self.process = subprocess.Popen([*before, binary, "serve", "--models", models, "--address", self.address,
                                         "--grpc-address", grpc,
                                         "--drain-announce", "0s", "--set", "models.cache=", *flags], stdout=self.log, stderr=self.log,
                                        env={**os.environ, "CONCERTINA_ADMIN_TOKEN": self.TOKEN})
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                sys.exit("the server ended; see /tmp/concertina-bench.log")
            try:
                urllib.request.urlopen(f"http://{self.address}/v2/health/ready", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        sys.exit("the server did not become ready; see /tmp/concertina-bench.log")

    def memory(self, **change):
        """The memory ledger, after changing it if anything is to be changed."""
        request = urllib.request.Request(f"http://{self.address}/admin/memory",
                                         headers={"Authorization": f"Bearer {self.TOKEN}"},
                                         data=json.dumps(change).encode() if change else None)
        return json.load(urllib.request.urlopen(request, timeout=5))

    def metric(self, name, **labels):
        """The sum of the lines of one metric that carry these labels."""
        text = urllib.request.urlopen(f"http://{self.address}/metrics", timeout=5).read().decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))

    def instances(self, model):
        """How many instances the server gave a model."""
        arenas = self.memory()["devices"][0]["arenas"]
        return sum(arena["kind"] == "run" and arena["label"].startswith(f"{model}/") for arena in arenas)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        if code != 0:
            sys.exit(f"the server ended with {code}")


def machine():
    """One line on where and when something was measured."""
    name = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return (f"Machine: {os.cpu_count()} cores, {name}, {platform.system()} {platform.release().split('-')[0]}; {time.strftime('%Y-%m-%d')}; "
            f"commit {commit}; ONNX Runtime 1.31.1, CPU.")
