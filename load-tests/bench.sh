#!/usr/bin/env bash
# Builds the measuring programs and measures the server against ONNX Runtime alone. Arguments go to bench.py.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --locked --examples --bins
exec "${PYTHON:-python3}" load-tests/bench.py "$@"
