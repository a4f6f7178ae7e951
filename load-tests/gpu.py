#!/usr/bin/env python3
"""Everything that is tested and measured on a GPU, in one go, with a table at the end.

    load-tests/gpu.py --bin FOLDER --library libonnxruntime.so --out FOLDER [--only tests,throughput,...] [--commit ID]

The folder of binaries holds `concertina`, `gpu_bench`, `neighbour` and, for `tests`, `device` (the test program
tests/device.rs). Models are made by gpu_models.py. Nothing else may use the GPU meanwhile.
"""
import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PORT = 8123
TEXT = [f"{name}:INT64:128" for name in ("input_ids", "attention_mask", "token_type_ids")]
INPUTS = {"bert16": (TEXT, "FP16"), "bert32": (TEXT, "FP32"), "minilm": (TEXT, "FP32"),
          "resnet32": (["image:FP32:3x224x224"], "FP32"), "resnet16": (["image:FP16:3x224x224"], "FP16")}
#: What the squeeze leaves free, in bytes; the way down is gone twice, and everything is given back at the end.
LEVELS = ["8GB", "2GB", "1GB", "600MB", "free", "2GB", "600MB", "free"]
STEP = 5.0
#: What the server must leave free meanwhile. The neighbour takes what it is left until its own level is reached, so a headroom
#: above the last level would have the server give up everything.
HEADROOM = 512 << 20
#: What there is for the largest batch, in bytes.
TOTAL = 1_500_000_000


class Bench:
    def __init__(self, options):
        self.options, self.rows = options, []
        self.out = pathlib.Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.models = pathlib.Path(options.models)

    def bin(self, name):
        return str(pathlib.Path(self.options.bin, name))

    def note(self, part, model, what, value, goal=""):
        value = f"{value:.4g}" if isinstance(value, float) else str(value)
        self.rows.append((part, model, what, value, goal))
        print("|", " | ".join(self.rows[-1]), "|", flush=True)

    def run(self, name, command, limit, stdin=None):
        """Runs a command with its output kept; returns its output, whatever became of it."""
        log = self.out / f"{name}.log"
        with open(log, "w") as file:
            try:
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit, input=stdin, text=True)
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = "timeout"
        text = log.read_text(errors="replace")
        if code != 0:
            self.note("failure", "", name, f"exit {code}: {text[-300:].strip()}")
        return text

    # The server, and what is asked of it.

    def on_cores(self, first, end):
        """The server and the load on cores of their own, if some are set apart for the load."""
        return ["taskset", "--cpu-list", f"{first}-{end - 1}"] if self.options.client_cores else []

    def serve(self, models, *flags):
        """Starts the server with these models only and waits until it is ready."""
        folder = self.out.parent / "served"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in models:
            os.symlink((self.models / name).resolve(), folder / name)
        log = open(self.out / f"serve-{'-'.join(models)}.log", "w")
        command = [*self.on_cores(self.options.client_cores, os.cpu_count()), self.bin("concertina"), "serve", "--models",
                   str(folder), "--address", f"127.0.0.1:{PORT}", "--cache", "", "--set", "runtime.providers=cuda", "--drain-announce", "0s", "--onnxruntime", self.options.library, *flags]
        environment = dict(os.environ, CONCERTINA_ADMIN_TOKEN="gpu-bench")
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        ends = 0
        for _ in range(1200):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v2/health/ready", timeout=1) as answer:
                    if answer.status == 200:
                        return server
            except OSError:
                if "loading is over" in pathlib.Path(log.name).read_text(errors="replace") and server.poll() is None:
                    ends += 1
                    if ends > 20:
                        break
                time.sleep(0.1)
        server.kill()
        server.wait()
        raise RuntimeError("the server did not become ready")

    def stop(self, server):
        server.send_signal(signal.SIGTERM)
        try:
            return server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            return "killed"

    def load_command(self, model, connections, seconds, rows=1):
        inputs, output = INPUTS[model]
        command = [*self.on_cores(0, self.options.client_cores), self.bin("gpu_bench"), "load", "--address", f"127.0.0.1:{PORT}", "--model", model, "--output", output,
                   "--connections", str(connections), "--seconds", str(seconds), "--rows", str(rows), "--tolerance", "0.05"]
        return command + [word for one in inputs for word in ("--input", one)]

    def load(self, model, connections, seconds, rows=1):
        text = self.run(f"load-{model}", self.load_command(model, connections, seconds, rows), seconds + 60)
        return json.loads(text.strip().splitlines()[-1])

    def metrics(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
            return answer.read().decode()

    def memory(self):
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/admin/memory",
                                         headers={"Authorization": "Bearer gpu-bench"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def stage_seconds(self):
        """Seconds per stage and batches so far."""
        text = self.metrics()
        found = re.findall(r'concertina_(stage|device)_seconds_total\{[^}]*stage="(\w+)"[^}]*\} (\S+)', text)
        stages = {name if kind == "stage" else f"device {name}": float(value) for kind, name, value in found}
        batches = sum(float(value) for value in re.findall(r"batches_total\{[^}]*\} (\S+)", text))
        return stages, batches

    # The parts.

    def tests(self):
        os.environ["CONCERTINA_ONNXRUNTIME"] = self.options.library
        os.environ["CONCERTINA_DEVICE_MODELS"] = str(self.models)
        # cargo says so to the tests that it runs itself.
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"
        text = self.run("device", [self.bin("device"), "--nocapture", "--test-threads", "1"], 240)
        for line in text.splitlines():
            if "NUMBER" in line:
                print(line.split("NUMBER", 1)[1].strip())
        results = re.findall(r"test (\S+) \.\.\. (?:.*\n)*?(ok|FAILED)", text)
        summary = re.findall(r"test result: (.*)", text)
        self.note("tests", "", "tests/device.rs", summary[-1] if summary else f"no result, {len(results)} ran", "all pass")

    def profile(self):
        for model in self.options.names:
            command = [self.bin("concertina"), "profile", model, "--models", str(self.models), "--cache", "",
                       "--set", "runtime.providers=cuda", "--onnxruntime", self.options.library]
            print(self.run(f"profile-{model}", command, 120), flush=True)

    def alone(self, model, batches, seconds=0.7, *flags):
        command = [self.bin("gpu_bench"), "alone", "--library", self.options.library, "--model",
                   str(self.models / model / "1" / "model.onnx"), "--seconds", str(seconds), "--batches", batches,
                   *(["--option", "prefer_nhwc=1"] if model.endswith("-nhwc") else []), *flags]
        lines = self.run(f"alone-{model}", command, 120).strip().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def throughput(self):
        for model in self.options.names:
            before = self.alone(model, "16,32,64,128,256")
            server = self.serve([model], "--set", "model.max_queue_bytes=1GiB")
            try:
                loads = []
                connections, rows = (256, 4) if model.startswith(("bert", "minilm")) else (128, 8)
                for _ in range(3):
                    loads.append(self.load(model, connections, 15, rows))
                stages, batches = self.stage_seconds()
            finally:
                self.stop(server)
            after = self.alone(model, "16,32,64,128,256")
            best = [max(entry.get("rows_per_second", 0) for entry in one) for one in (before, after)]
            rates = [entry["rows_per_second"] for entry in loads]
            rate, reference = statistics.median(rates), statistics.mean(best)
            self.note("throughput", model, "ONNX Runtime alone, best rows/s before, after", " ".join(f"{b:.0f}" for b in best))
            self.note("throughput", model, "server rows/s, three loads", " ".join(f"{r:.0f}" for r in rates))
            self.note("throughput", model, "server over alone", rate / reference, ">= 0.95")
            self.note("throughput", model, "errors, wrong answers", f"{sum(e['errors'] for e in loads)} {sum(e['wrong'] for e in loads)}", "0 0")
            if batches:
                per = {name: f"{1e3 * value / batches:.2f}" for name, value in stages.items()}
                self.note("throughput", model, "ms per batch and stage", json.dumps(per))

    def several(self):
        """One model on all cards of the machine, against the same on one."""
        cards = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
        if cards < 2:
            return self.note("several", "", "cards", cards, "at least 2")
        for model in self.options.names:
            rates = {}
            for count in (1, cards):
                devices = ", ".join(f'{{ device = "cuda:{card}" }}' for card in range(count))
                config = self.out / f"several-{count}.toml"
                config.write_text(f'[runtime]\ngpus = {list(range(cards))}\n[http]\nmax_bodies_bytes = "2GiB"\n'
                                  f'[model]\nmax_queue_bytes = "2GiB"\ninstances = [{devices}]\n')
                server = self.serve([model], "--config", str(config))
                try:
                    connections, rows = (256, 4) if model.startswith(("bert", "minilm")) else (128, 8)
                    loads = [self.load(model, connections * count, 5, rows) for _ in range(3)]
                    stats = self.memory()
                finally:
                    code = self.stop(server)
                rates[count] = statistics.median(entry["rows_per_second"] for entry in loads)
                told = " ".join(f"{entry['rows_per_second']:.0f}" for entry in loads)
                self.note("several", model, f"{count} cards: rows/s, three loads", told)
                self.note("several", model, f"{count} cards: errors, wrong answers, exit code",
                          f"{sum(e['errors'] for e in loads)} {sum(e['wrong'] for e in loads)} {code}", "0 0 0")
                committed = " ".join(f"{device['committed'] >> 20}" for device in stats["devices"][1:])
                self.note("several", model, f"{count} cards: committed MiB of each", committed)
            self.note("several", model, f"{cards} cards over one", rates[cards] / rates[1])

    def lonely(self):
        for model in self.options.names:
            alone = self.alone(model, "1,2,4,8")
            server = self.serve([model])
            try:
                self.load(model, 1, 1)
                before = self.stage_seconds()
                entry = self.load(model, 1, 3)
                after = self.stage_seconds()
                stats = self.memory()
            finally:
                self.stop(server)
            batches = max(1.0, after[1] - before[1])
            stages = {name: 1e3 * (after[0][name] - before[0].get(name, 0)) / batches for name in after[0]}
            self.note("lonely", model, "ONNX Runtime alone, ms at batch 1, 2, 4, 8",
                      " ".join(f"{1e3 * one['median_seconds']:.2f}" for one in alone if "median_seconds" in one))
            text = (self.out / f"serve-{model}.log").read_text(errors="replace")
            device = re.search(r"a run was recorded rows=1 .*device=([\d.]+)(ms|µs)", text)
            if device:
                took = float(device[1]) / (1 if device[2] == "ms" else 1000)
                self.note("lonely", model, "device ms by events, recorded, copies included", took,
                          {"bert16": "<= 0.7", "bert16-fused": "<= 0.7", "resnet32": "<= 0.9", "resnet32-nhwc": "<= 0.9"}.get(model, ""))
            self.note("lonely", model, "ms from launch to done as the host sees it", stages.get("compute", 0.0))
            self.note("lonely", model, "whole request, median ms", 1e3 * entry["p50_seconds"])
            self.note("lonely", model, "request less device, ms", 1e3 * entry["p50_seconds"] - stages.get("compute", 0.0), "<= 0.4")
            self.note("lonely", model, "ms per stage", json.dumps({name: f"{value:.3f}" for name, value in stages.items()}))
            gpu = stats["devices"][-1]
            self.note("lonely", model, "committed MiB, outside MiB", f"{gpu['committed'] >> 20} {gpu.get('outside', 0) >> 20}")

    def prepare(self):
        """Other forms of models: attention written as one operator, and convolutions with the channels last."""
        for model in self.options.names:
            base, _, form = model.partition("-")
            if not form:
                continue
            INPUTS[model] = INPUTS[base]
            target = self.models / model / "1" / "model.onnx"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            text = (self.models / base / "model.toml").read_text()
            if form == "nhwc":
                os.link(self.models / base / "1" / "model.onnx", target)
                text += '[cuda]\nprefer_nhwc = "1"\n'
            else:
                self.optimize(base, model, target)
            (self.models / model / "model.toml").write_text(text)

    def optimize(self, base, model, target):
        command = [self.bin("concertina"), "optimize", base, "--models", str(self.models), "--cache", "", "--out", str(target),
                   "--tolerance", "1e-2", "--set", "runtime.providers=cuda", "--onnxruntime", self.options.library]
        text = self.run(f"optimize-{base}", command, 120)
        for line in re.findall(r"^.*(?:one operator now|answers differ|rows per second).*$", text, re.MULTILINE):
            self.note("optimize", model, "concertina optimize", line.strip())

    def answers(self):
        """How far both forms in half precision are from the same weights in single precision."""
        names = ["bert32", "bert16", "bert16-fused"]
        if not set(names) <= set(self.options.names):
            return
        server = self.serve(names)
        try:
            truth, plain, fused = (self.ask(name) for name in names)
        finally:
            self.stop(server)
        largest = max(map(abs, truth))
        pairs = {"bert16": (truth, plain), "bert16-fused": (truth, fused), "bert16-fused to bert16": (plain, fused)}
        for name, (left, right) in pairs.items():
            apart = max(abs(a - b) for a, b in zip(left, right)) / largest
            square = (sum((a - b) ** 2 for a, b in zip(left, right)) / sum(a * a for a in truth)) ** 0.5
            self.note("answers", name, "16 texts, apart from fp32 or as it says: of the largest value, of all", f"{apart:.1e} {square:.1e}")

    def ask(self, model, rows=16, tokens=128):
        chance = random.Random(5)
        lengths = [chance.randint(tokens // 4, tokens) for _ in range(rows)]
        data = {"input_ids": [chance.randint(1000, 20000) for _ in range(rows * tokens)],
                "attention_mask": [int(at < length) for length in lengths for at in range(tokens)],
                "token_type_ids": [0] * (rows * tokens)}
        inputs = [{"name": name, "shape": [rows, tokens], "datatype": "INT64", "data": values} for name, values in data.items()]
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["outputs"][0]["data"]

    def squeeze(self):
        """A neighbour takes the card down to less and less, while the server, which must leave HEADROOM free, is under
        saturating load. The best static batch is the best measured size whose bytes the ledger allows at that level."""
        for model in [name for name in self.options.names if name in ("bert32", "resnet32")]:
            steps = len(LEVELS) + 1
            server = self.serve([model], "--set", f"memory.headroom={HEADROOM}", "--set", "model.max_queue_bytes=1GiB")
            try:
                connections, rows = (256, 2) if model.startswith("bert") else (128, 8)
                load = subprocess.Popen(self.load_command(model, connections, STEP * steps, rows), stdout=subprocess.PIPE, text=True)
                log = open(self.out / f"neighbour-{model}.log", "w+")
                budgets = []
                time.sleep(STEP)
                neighbour = subprocess.Popen([self.bin("neighbour"), "--every", str(STEP), "--headroom", str(HEADROOM), *LEVELS],
                                             stdout=log, stderr=subprocess.STDOUT)
                for _ in LEVELS:
                    time.sleep(STEP * 0.8)
                    budgets.append(self.memory()["devices"][-1]["budget"])
                    time.sleep(STEP * 0.2)
                neighbour.wait(STEP)
                entry = json.loads(load.communicate(timeout=90)[0].strip().splitlines()[-1])
                stats = self.memory()
            finally:
                self.stop(server)
            sizes = self.measured_sizes(model)
            log.seek(0)
            reports = [json.loads(line) for line in log if line.startswith("{")]
            watched = [one for one in reports if "headroom" in one]
            json.dump({"load": entry, "neighbour": reports, "budgets": budgets, "sizes": sizes},
                      open(self.out / f"squeeze-{model}.json", "w"))
            tenths = entry["timeline"]
            for index, level in enumerate(["nothing", *LEVELS]):
                one = tenths[int(10 * STEP * index):int(10 * STEP * (index + 1))]
                if len(one) < 20:
                    continue
                steady = sum(one[15:-2]) / len(one[15:-2]) * 10
                window = 5
                settled = next((at / 10 for at in range(len(one) - window) if sum(one[at:at + window]) * 10 / window >= 0.9 * steady), None)
                value = f"{steady:.0f} rows/s, settled after {settled} s"
                if index:
                    budget = budgets[index - 1]
                    best = max((rate for rows, bytes_, rate in sizes if bytes_ <= budget), default=0)
                    value += f", best static batch {best:.0f} ({steady / best:.2f} of it), {budget >> 20} MiB for runs" if best else ""
                    if index - 1 < len(watched):
                        short = watched[index - 1]["short_until"]
                        value += f", headroom short for {0 if short is None else 1000 * short:.0f} ms"
                self.note("squeeze", model, f"{level} free" if index else "nothing taken", value, ">= 0.95, < 1 s, < 100 ms")
            self.note("squeeze", model, "failed requests, wrong answers", f"{entry['errors']} {entry['wrong']}", "0 0")
            self.note("squeeze", model, "counters", json.dumps(stats["devices"][-1].get("counters", {})))

    def measured_sizes(self, model):
        """Rows, bytes as `concertina profile` measures them, and rows per second of ONNX Runtime alone, of each size."""
        rates = {one["batch"]: one.get("rows_per_second", 0) for one in self.alone(model, "1,2,4,8,16,32,64,128,256", 0.4)}
        command = [self.bin("concertina"), "profile", model, "--models", str(self.models), "--cache", "", "--json",
                   "--set", "runtime.providers=cuda", "--onnxruntime", self.options.library]
        text = self.run(f"sizes-{model}", command, 60)
        at = re.search(r"^\{", text, re.MULTILINE)
        profile = json.JSONDecoder().raw_decode(text[at.start():])[0] if at else {"rows": []}
        return [(one["rows"], one["observed_bytes"], rates.get(one["rows"], 0)) for one in profile["rows"]]

    def squeeze_alone(self):
        """What fixed batches of ONNX Runtime do at each level: a fresh process at each, so that each size finds the memory
        that a server of that size would have."""
        for model in [name for name in self.options.names if name in ("bert32", "resnet32")]:
            for level in LEVELS[:-1]:
                hog = subprocess.Popen([self.bin("neighbour"), "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                # The process that is measured needs its context and libraries before the level is taken.
                command = [self.bin("gpu_bench"), "alone", "--library", self.options.library, "--model",
                           str(self.models / model / "1" / "model.onnx"), "--seconds", "0.5", "--step",
                           "--batches", "1,1,2,4,8,16,32,64,128"]
                one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                best, failed = 0.0, []
                try:
                    for step in range(9):
                        if step == 1:
                            hog.stdin.write(level + "\n")
                            hog.stdin.flush()
                            hog.stdout.readline()
                        one.stdin.write("\n")
                        one.stdin.flush()
                        entry = json.loads(one.stdout.readline())
                        if step and "error" in entry:
                            failed.append(entry["batch"])
                        elif step:
                            best = max(best, entry["rows_per_second"])
                except (OSError, json.JSONDecodeError) as error:
                    failed.append(str(error))
                for process in (one, hog):
                    process.stdin.close()
                    process.kill()
                    process.wait()
                self.note("squeeze", model, f"{level} free: ONNX Runtime alone, best rows/s, sizes that fail", f"{best:.0f} {failed}")

    def largest(self):
        """The largest batch that runs in so much memory in all, weights and inputs included: sizes are run upwards until one
        fails. The bound is what is left beside the weights over the run memory that one more row takes."""
        for model in self.options.names:
            some = self.profile_within(model, "16,32,64")
            if not some:
                continue
            rows = {entry["rows"]: entry["observed_bytes"] for entry in some["rows"]}
            few, many = min(rows), max(rows)
            if few == many:
                self.note("largest", model, "rows that ran in 1.5 GB", f"{many} of 16, 32, 64")
                continue
            per_row = (rows[many] - rows[few]) / (many - few)
            bound = (TOTAL - some["weights_bytes"]) / per_row
            upwards = sorted({int(bound * percent / 100) for percent in range(70, 101)})
            ran = self.profile_within(model, ",".join(map(str, upwards)))
            most = max((entry["rows"] for entry in ran["rows"]), default=0) if ran else 0
            self.note("largest", model, "rows that ran in 1.5 GB, physical bound", f"{most} {bound:.1f}")
            self.note("largest", model, "of the physical bound", most / bound, ">= 0.9")
            sizes = sorted({int(bound * part) for part in (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0)})
            ours = self.alone(model, ",".join(str(size) for size in sizes if size), 0.05, "--arena-limit", str(TOTAL))
            alone = [one["batch"] for one in ours if "rows_per_second" in one]
            self.note("largest", model, "ONNX Runtime's arena with that limit", max(alone, default=0), "less")

    def profile_within(self, model, sizes):
        # Recorded runs are the first that go when memory is short, so they are not counted as needed.
        command = [self.bin("concertina"), "profile", model, "--rows", sizes, "--models", str(self.models), "--cache", "", "--json",
                   "--set", "runtime.providers=cuda", "--onnxruntime", self.options.library, "--set", f"memory.limit={TOTAL}",
                   "--set", "model.cuda_graph=off"]
        text = self.run(f"largest-{model}", command, 120)
        at = re.search(r"^\{", text, re.MULTILINE)
        return json.JSONDecoder().raw_decode(text[at.start():])[0] if at else None

    def table(self):
        head = [f"# On a GPU\n\nCommit {self.options.commit}. ", self.card(), "\n\nWritten by `load-tests/gpu.py`.\n\n",
                "| part | model | what | value | goal |\n| --- | --- | --- | --- | --- |\n"]
        lines = ["| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |\n" for row in self.rows]
        text = "".join(head + lines)
        (self.out / "gpu.md").write_text(text)
        print(text)

    def card(self):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            card = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except OSError:
            card = "unknown"
        return f"Card, driver, memory: {card}. {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores."


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--library", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="/tmp/concertina-gpu-models")
    parser.add_argument("--names", default="bert16,bert16-fused,resnet32,resnet32-nhwc,resnet16,minilm,bert32", type=lambda text: text.split(","))
    parser.add_argument("--only", default="tests,throughput,lonely,answers,squeeze,squeeze_alone,largest", type=lambda text: text.split(","))
    parser.add_argument("--client-cores", type=int, default=0, help="cores set apart for the load; 0: both share all")
    parser.add_argument("--commit", default="unknown")
    bench = Bench(parser.parse_args())
    begin = time.time()
    bench.run("models", [sys.executable, str(HERE / "gpu_models.py"), str(bench.models),
                         *sorted({name.partition("-")[0] for name in bench.options.names})], 240)
    bench.prepare()
    print(f"models after {time.time() - begin:.0f} s", flush=True)
    for part in bench.options.only:
        try:
            getattr(bench, part)()
        except Exception as error:  # One part that fails must not cost the others.
            bench.note("failure", "", part, repr(error))
        print(f"{part} after {time.time() - begin:.0f} s", flush=True)
    bench.table()


if __name__ == "__main__":
    main()
