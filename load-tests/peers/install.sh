#!/usr/bin/env bash
# Fills PEERS_HOME with the servers that load-tests/peers.py compares with, each in an environment of its own, and with the models.
# Needed: python3.11 (Triton's Python backend is built for it), wrk.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${PEERS_HOME:?name a folder outside the repository}"
runtime=onnxruntime==1.31.1
environment() { # NAME PACKAGES...
    [ -x "$PEERS_HOME/venv/$1/bin/python" ] || python3.11 -m venv "$PEERS_HOME/venv/$1"
    "$PEERS_HOME/venv/$1/bin/pip" install --quiet "${@:2}" "$runtime"
}
mkdir -p "$PEERS_HOME"/{venv,models,bodies,run}
environment base numpy onnx
environment mlserver mlserver==1.7.1 'uvloop<0.22'
environment litserve litserve==0.2.19
environment mosec mosec==0.9.8
environment bentoml bentoml==1.4.40
environment pyt 'numpy<2'
# Only the server that it carries is used, so none of what it depends on.
"$PEERS_HOME/venv/pyt/bin/pip" install --quiet --no-deps nvidia-pytriton==0.7.0
for model in magika minilm; do
    mkdir -p "$PEERS_HOME/models/$model"
    cp "$here/../../models/$model/1/model.onnx" "$PEERS_HOME/models/$model/model.onnx"
done
"$PEERS_HOME/venv/base/bin/python" "$here/mlp.py" "$PEERS_HOME/models"
