#!/usr/bin/env bash
# Builds what is tested and measured on a GPU and runs all of it: `make setup-gpu` first. Arguments go to gpu.py.
# Python needs torch, torchvision and transformers, which make the models.
set -euo pipefail
cd "$(dirname "$0")/.."
gpu=$PWD/.setup/gpu bin=$PWD/.setup/gpu-bin
cargo build --release --locked --bins --example gpu_bench --example neighbour
device=$(cargo test --release --locked --no-run --test device --message-format=json |
    python3 -c 'import json, sys; print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable") and m["target"]["name"] == "device"][-1])')
mkdir -p "$bin"
cp "${CARGO_TARGET_DIR:-target}"/release/{concertina,examples/gpu_bench,examples/neighbour} "$bin/"
cp "$device" "$bin/device"
LD_LIBRARY_PATH=$(find "$gpu/nvidia" -name 'lib*.so*' -printf '%h\n' | sort -u | tr '\n' ':')${LD_LIBRARY_PATH:-}
export LD_LIBRARY_PATH CONCERTINA_ONNXRUNTIME=$gpu/onnxruntime/capi/libonnxruntime.so.1.31.1
exec python3 load-tests/gpu.py --bin "$bin" --library "$CONCERTINA_ONNXRUNTIME" --out load-tests/gpu-out \
    --commit "$(git rev-parse --short HEAD)" "$@"
