"""How each server is started: its command, its environment, and where it answers."""
import os
import pathlib
import shutil

HERE = pathlib.Path(__file__).resolve().parent
HOME = pathlib.Path(os.environ.get("PEERS_HOME", "/nonexistent"))
BINARY = ("triton", "mlserver", "concertina")

# Inputs and output of each model, as Triton's configuration wants them: name, type, dimensions.
SHAPES = {
    "minilm": ([("input_ids", "INT64", "-1"), ("attention_mask", "INT64", "-1"), ("token_type_ids", "INT64", "-1")],
               ("sentence_embedding", "FP32", "384")),
    "magika": ([("bytes", "INT32", "2048")], ("target_label", "FP32", "214")),
    "mlp": ([("x", "FP32", "256")], ("y", "FP32", "16")),
    "mlp_big": ([("x", "FP32", "256")], ("y", "FP32", "16")),
}


def plan(peer, model, file, port, instances, threads, delay, binary=None):
    """Command, environment and path of one peer that serves one model."""
    environment = os.environ | {
        "MODEL": str(file), "THREADS": str(threads), "INSTANCES": str(instances), "MAX_BATCH": "64", "DELAY_SECONDS": str(delay),
        "PORT": str(port), "OUTPUT": SHAPES[model][1][0], "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    folder = HOME / "run" / f"{peer}-{model}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python = HOME / "venv" / peer / "bin" / "python"
    v2 = f"/v2/models/{model}/infer"
    if peer == "concertina":
        command = [binary, "serve", "--models", file, "--model-name", model, "--address", f"127.0.0.1:{port}", "--cache", ""]
        return command, os.environ, folder, v2
    if peer == "litserve":
        return [python, HERE / "litserve_app.py"], environment, folder, "/predict"
    if peer == "mosec":
        command = [python, HERE / "mosec_app.py", "--address", "127.0.0.1", "--port", port, "--timeout", "60000"]
        return command, environment, folder, "/inference"
    if peer == "bentoml":
        environment["BENTOML_DO_NOT_TRACK"] = "true"
        command = [python.with_name("bentoml"), "serve", "bentoml_app:Model", "--working-dir", HERE, "--host", "127.0.0.1", "--port", port]
        return command, environment, folder, "/predict"
    if peer == "mlserver":
        mlserver(folder, model, port, instances, delay)
        return [python.with_name("mlserver"), "start", folder], environment, folder, v2
    if peer == "triton":
        return triton(folder, model, port, instances, delay, environment), environment, folder, v2
    raise ValueError(f"unknown peer {peer}")


def mlserver(folder, model, port, instances, delay):
    (folder / "settings.json").write_text(
        f'{{"host": "127.0.0.1", "http_port": {port}, "grpc_port": {port + 1}, "metrics_port": {port + 2}, '
        f'"parallel_workers": {instances}, "debug": false}}')
    (folder / "model-settings.json").write_text(
        f'{{"name": "{model}", "implementation": "mlserver_app.Model", "max_batch_size": 64, "max_batch_time": {delay}}}')


def triton(folder, model, port, instances, delay, environment):
    """The server that the nvidia-pytriton package carries, with its Python backend."""
    packages = HOME / "venv/pyt/lib/python3.11/site-packages"
    server = packages / "pytriton/tritonserver"
    backend = folder / "backends/python"
    shutil.copytree(server / "backends/python", backend)
    for stub in (server / "python_backend_stubs/3.11").iterdir():
        shutil.copy(stub, backend)
    version = folder / "models" / model / "1"
    version.mkdir(parents=True)
    shutil.copy(HERE / "triton_app.py", version / "model.py")
    inputs, output = SHAPES[model]
    entry = lambda name, kind, dims: f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}'
    (version.parent / "config.pbtxt").write_text("\n".join([
        'backend: "python"', "max_batch_size: 64", "input [ " + ", ".join(entry(*one) for one in inputs) + " ]",
        f"output [ {entry(*output)} ]", f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]",
        f"dynamic_batching {{ max_queue_delay_microseconds: {round(delay * 1e6)} }}", ""]))
    environment |= {"PEER_PACKAGES": str(packages), "PEER_FOLDER": str(HERE), "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs")}
    return [server / "bin/tritonserver", "--model-repository", folder / "models", "--backend-directory", folder / "backends",
            "--http-address", "127.0.0.1", "--http-port", port, "--grpc-address", "127.0.0.1", "--grpc-port", port + 1,
            "--metrics-address", "127.0.0.1", "--metrics-port", port + 2]
