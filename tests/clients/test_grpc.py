"""gRPC as its clients speak it: tritonclient sync and asyncio, streams, plain messages, health and reflection."""
import asyncio
import queue
import threading

import grpc
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as aio_client
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from harness import PATIENCE, ServerTestCase, in_threads, wait_until
from test_datatypes import FLOATS, HALVES, columns
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def as_inputs(arrays):
    """tritonclient's inputs from {name: array}."""
    inputs = []
    for name, array in arrays.items():
        entry = grpc_client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        inputs.append(entry.set_data_from_numpy(array))
    return inputs


class GrpcTestCase(ServerTestCase):
    """One server for all tests of a class, and a client that speaks gRPC to it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.grpc = grpc_client.InferenceServerClient(cls.server.grpc_url)
        cls.addClassCleanup(cls.grpc.close)
        cls.channel = grpc.insecure_channel(cls.server.grpc_url)
        cls.addClassCleanup(cls.channel.close)

    def assert_status(self, status, words, call, *arguments, **options):
        with self.assertRaises(InferenceServerException) as caught:
            call(*arguments, **options)
        self.assertEqual(caught.exception.status(), f"StatusCode.{status}", caught.exception.message())
        self.assertIn(words, caught.exception.message())


class What(GrpcTestCase):
    def test_health(self):
        self.assertTrue(self.grpc.is_server_live())
        self.assertTrue(self.grpc.is_server_ready())
        self.assertTrue(self.grpc.is_model_ready("affine"))
        self.assertTrue(self.grpc.is_model_ready("affine", "1"))

    def test_metadata_and_configuration_are_those_of_http(self):
        for model in ("affine", "datatypes", "no_batch"):
            metadata = self.grpc.get_model_metadata(model, as_json=True)
            expected = self.client.get_model_metadata(model)
            for tensor in metadata["inputs"] + metadata["outputs"]:
                tensor["shape"] = [int(size) for size in tensor["shape"]]  # This client's JSON has them as texts.
            self.assertEqual(metadata, expected)
            config, other = self.grpc.get_model_config(model).config, self.client.get_model_config(model)
            self.assertEqual(config.max_batch_size, other["max_batch_size"])
            self.assertEqual([(i.name, model_config_pb2.DataType.Name(i.data_type), list(i.dims)) for i in config.input],
                             [(i["name"], i["data_type"], i["dims"]) for i in other["input"]])
            self.assertEqual(config.HasField("dynamic_batching"), "dynamic_batching" in other)
        self.assertIn("binary_tensor_data", self.grpc.get_server_metadata().extensions)

    def test_the_index_is_that_of_http(self):
        index = [(m.name, m.version, m.state) for m in self.grpc.get_model_repository_index().models]
        self.assertEqual(index, [(m["name"], m["version"], m["state"]) for m in self.client.get_model_repository_index()])

    def test_the_standard_health_service(self):
        health = health_pb2_grpc.HealthStub(self.channel)
        for service in ("", "inference.GRPCInferenceService", "affine"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
            self.assertEqual(answer.status, health_pb2.HealthCheckResponse.SERVING)
        with self.assertRaises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
        watch.cancel()

    def test_reflection_shows_names_and_numbers_of_the_published_interface(self):
        database = ProtoReflectionDescriptorDatabase(self.channel)
        self.assertLessEqual({"inference.GRPCInferenceService", "grpc.health.v1.Health"}, set(database.get_services()))
        service = self.described(database, "inference.GRPCInferenceService")
        published = file_of(service_pb2)
        self.assertEqual(methods(service), methods(published))
        self.assertEqual(fields(service), fields(published))
        config, published = fields(self.described(database, "inference.ModelConfig")), fields(file_of(model_config_pb2))
        self.assertGreater(len(config), 60)
        self.assertLessEqual(config, published)

    def described(self, database, symbol):
        return database.FindFileContainingSymbol(symbol)


def file_of(module):
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


def methods(file):
    return {(s.name, m.name, m.input_type, m.output_type, m.client_streaming, m.server_streaming)
            for s in file.service for m in s.method}


def fields(file):
    """Every field of every message: its path, number, type and label."""
    found = set()

    def walk(prefix, message):
        for field in message.field:
            kind = field.type_name.replace("ParameterChoice", "") or field.type
            found.add((f"{prefix}{message.name}.{field.name}", field.number, kind, field.label))
        for nested in message.nested_type:
            walk(f"{prefix}{message.name}.", nested)

    for message in file.message_type:
        walk("", message)
    return found


class Infer(GrpcTestCase):
    def test_every_datatype_comes_back_unchanged(self):
        for arrays in (columns(), columns(rows=7, width=6), columns(rows=2, width=0)):
            result = self.grpc.infer("datatypes", as_inputs({f"in_{name}": a for name, a in arrays.items()}))
            for name, array in arrays.items():
                with self.subTest(datatype=name):
                    self.assert_same(result.as_numpy(f"out_{name}"), array)

    def test_nan_and_infinity(self):
        arrays = columns()
        for name in FLOATS | HALVES:
            arrays[name][:] = [[np.nan, np.inf, -np.inf], [1, -np.inf, np.nan]]
        result = self.grpc.infer("datatypes", as_inputs({f"in_{name}": a for name, a in arrays.items()}))
        for name in FLOATS | HALVES:
            # numpy does not know what is not a number in every one of these types.
            self.assert_same(result.as_numpy(f"out_{name}").astype(np.float64), arrays[name].astype(np.float64))

    def test_typed_contents(self):
        request = service_pb2.ModelInferRequest(model_name="affine")
        entry = request.inputs.add(name="x", datatype="FP32", shape=[3, 4])
        entry.contents.fp32_contents.extend(ROWS.ravel())
        answer = service_pb2_grpc.GRPCInferenceServiceStub(self.channel).ModelInfer(request, timeout=PATIENCE)
        self.assertEqual((answer.outputs[0].name, list(answer.outputs[0].shape)), ("y", [3, 4]))
        self.assert_same(np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(3, 4), 2 * ROWS + 1)

    def test_typed_contents_of_every_datatype_that_has_them(self):
        arrays = {name: array for name, array in columns().items() if name not in HALVES}
        lists = {"bool": "bool", "bytes": "bytes", "int64": "int64", "uint64": "uint64", "fp32": "fp32", "fp64": "fp64"}
        request = service_pb2.ModelInferRequest(model_name="datatypes")
        for name, array in arrays.items():
            kind = lists.get(name, "uint" if name.startswith("u") else "int")
            entry = request.inputs.add(name=f"in_{name}", datatype=name.upper(), shape=array.shape)
            getattr(entry.contents, f"{kind}_contents").extend(array.ravel().tolist())
        for name in HALVES:
            request.inputs.add(name=f"in_{name}", datatype=name.upper(), shape=[2, 0])
        with self.assertRaises(grpc.RpcError) as caught:  # Halves without elements have another width than the others.
            service_pb2_grpc.GRPCInferenceServiceStub(self.channel).ModelInfer(request, timeout=PATIENCE)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("in_", caught.exception.details())

    def test_compressed_requests(self):
        for algorithm in ("gzip", "deflate"):
            result = self.grpc.infer("affine", as_inputs({"x": ROWS}), compression_algorithm=algorithm)
            self.assert_same(result.as_numpy("y"), 2 * ROWS + 1)

    def test_ids_versions_and_requested_outputs(self):
        arrays = {"ids": np.array([[3, 5]], dtype=np.int64), "mask": np.array([[1, 0]], dtype=np.int64)}
        result = self.grpc.infer("varlen", as_inputs(arrays), outputs=[grpc_client.InferRequestedOutput("mean")],
                                 request_id="a 1", model_version="1")
        response = result.get_response()
        self.assertEqual((response.id, response.model_name, response.model_version), ("a 1", "varlen", "1"))
        self.assertEqual([output.name for output in response.outputs], ["mean"])

    def test_refusals(self):
        self.assert_status("NOT_FOUND", "nobody", self.grpc.infer, "nobody", as_inputs({"x": ROWS}))
        self.assert_status("NOT_FOUND", "version 7", self.grpc.infer, "affine", as_inputs({"x": ROWS}), model_version="7")
        self.assert_status("INVALID_ARGUMENT", "FP64", self.grpc.infer, "affine", as_inputs({"x": ROWS.astype(np.float64)}))
        self.assert_status("INVALID_ARGUMENT", "'x'", self.grpc.infer, "affine", [])
        self.assert_status("UNIMPLEMENTED", "shared memory", self.grpc.register_system_shared_memory, "r", "/r", 16)
        self.assertEqual(self.grpc.get_system_shared_memory_status(as_json=True), {})

    def test_callbacks(self):
        answers = queue.Queue()
        for number in range(50):
            row = np.full((1, 4), number, dtype=np.float32)
            self.grpc.async_infer("affine", as_inputs({"x": row}), request_id=str(number),
                                  callback=lambda result, error: answers.put((result, error)))
        for _ in range(50):
            result, error = answers.get(timeout=PATIENCE)
            self.assertIsNone(error)
            row = np.full((1, 4), int(result.get_response().id), dtype=np.float32)
            self.assert_same(result.as_numpy("y"), 2 * row + 1)

    def test_many_clients_at_once_each_get_their_own_answer(self):
        def ask(number):
            with grpc_client.InferenceServerClient(self.server.grpc_url) as client:
                rows = np.full((1 + number % 3, 4), number, dtype=np.float32)
                for _ in range(20):
                    self.assert_same(client.infer("affine", as_inputs({"x": rows})).as_numpy("y"), 2 * rows + 1)
            return True

        self.assertEqual(in_threads(16, ask), [True] * 16)

    def test_inferences_by_grpc_are_counted(self):
        name = 'concertina_requests_total{code="ok",model="conv",version="1"}'
        before = self.server.metric(name)
        self.grpc.infer("conv", as_inputs({"image": np.zeros((1, 3, 16, 16), dtype=np.float32)}))
        self.assertEqual(self.server.metric(name), before + 1)


    def test_statistics_are_those_of_http(self):
        self.grpc.infer("affine", as_inputs({"x": ROWS}))
        [entry] = self.grpc.get_inference_statistics("affine", as_json=True)["model_stats"]
        [expected] = self.client.get_inference_statistics("affine")["model_stats"]
        self.assertEqual(int(entry["inference_count"]), expected["inference_count"])
        self.assertEqual(int(entry["execution_count"]), expected["execution_count"])
        for part in ("success", "queue", "compute_infer"):
            self.assertEqual(int(entry["inference_stats"][part]["count"]), expected["inference_stats"][part]["count"])
        sizes = [(int(batch["batch_size"]), int(batch["compute_infer"]["count"])) for batch in entry["batch_stats"]]
        self.assertEqual(sizes, [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in expected["batch_stats"]])

    def test_classification(self):
        rows = np.array([[3, 1, 2, 0]], dtype=np.float32)
        outputs = [grpc_client.InferRequestedOutput("y", class_count=2)]
        result = self.grpc.infer("affine", as_inputs({"x": rows}), outputs=outputs)
        self.assertEqual(result.as_numpy("y").tolist(), [[b"7.000000:0", b"5.000000:2"]])

    def test_log_settings(self):
        settings = self.grpc.get_log_settings(as_json=True)["settings"]
        shown = self.client.get_log_settings()
        self.assertEqual({key: next(iter(value.values())) for key, value in settings.items()}, shown)


class Control(GrpcTestCase):
    OPTIONS = ("--admin-token", "correct-horse-battery")
    BEARER = {"authorization": "Bearer correct-horse-battery"}

    def test_unloading_and_loading(self):
        self.assert_status("UNAUTHENTICATED", "admin.token", self.grpc.unload_model, "affine")
        self.assert_status("UNAUTHENTICATED", "admin.token", self.grpc.load_model, "affine", headers={"authorization": "Bearer x"})
        self.grpc.unload_model("affine", headers=self.BEARER)
        self.assertFalse(self.grpc.is_model_ready("affine"))
        self.grpc.load_model("affine", headers=self.BEARER, config='{"max_batch_size": 3}')
        self.assertEqual(self.grpc.get_model_config("affine").config.max_batch_size, 3)
        self.assert_same(self.grpc.infer("affine", as_inputs({"x": ROWS})).as_numpy("y"), 2 * ROWS + 1)
        self.assert_status("NOT_FOUND", "nobody", self.grpc.load_model, "nobody", headers=self.BEARER)
        self.assert_status("INVALID_ARGUMENT", "file:1/model.onnx", self.grpc.load_model, "affine", headers=self.BEARER,
                           config="{}", files={"file:1/model.onnx": b"x"})


class Cancelled(GrpcTestCase):
    def test_a_cancelled_call_leaves_the_server(self):
        row = as_inputs({"x": np.array([[7]], dtype=np.float32)})
        many = as_inputs({"x": np.full((256, 1), 7, dtype=np.float32)})
        first = [self.grpc.async_infer("slow", many, callback=lambda result, error: None) for _ in range(64)]
        waiting = 'concertina_queue_requests{model="slow",version="1"}'
        wait_until(lambda: self.server.metric(waiting) > 0, "requests wait")
        for call in first:
            call.cancel()
        wait_until(lambda: self.server.metric("concertina_requests_in_flight") <= 1, "only this question is inside")
        self.assert_same(self.grpc.infer("slow", row).as_numpy("y").ravel(), np.array([7], dtype=np.float32))

    def test_a_deadline_is_kept(self):
        row = as_inputs({"x": np.array([[7]], dtype=np.float32)})
        self.assert_status("DEADLINE_EXCEEDED", "", self.grpc.infer, "slow", row, client_timeout=0.001)
        self.assert_status("DEADLINE_EXCEEDED", "", self.grpc.infer, "slow", as_inputs({"x": np.ones((64, 1), np.float32)}),
                           timeout=1)


class Streams(GrpcTestCase):
    def open(self, client):
        answers = queue.Queue()
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        return answers

    def test_answers_come_in_order_and_errors_in_their_place(self):
        with grpc_client.InferenceServerClient(self.server.grpc_url) as client:
            answers = self.open(client)
            for number in range(200):
                width = 3 if number == 50 else 4
                row = np.full((1, width), number, dtype=np.float32)
                client.async_stream_infer("affine", as_inputs({"x": row}), request_id=str(number))
            for number in range(200):
                result, error = answers.get(timeout=PATIENCE)
                if number == 50:
                    self.assertIn("'x'", error.message())
                else:
                    self.assertIsNone(error)
                    self.assertEqual(result.get_response().id, str(number))
                    self.assert_same(result.as_numpy("y"), np.full((1, 4), 2 * number + 1, dtype=np.float32))
            client.stop_stream()

    def test_a_cancelled_stream_leaves_the_server(self):
        with grpc_client.InferenceServerClient(self.server.grpc_url) as client:
            self.open(client)
            row = as_inputs({"x": np.array([[7]], dtype=np.float32)})
            for _ in range(32):
                client.async_stream_infer("slow", row)
            wait_until(lambda: self.server.metric("concertina_requests_in_flight") > 1, "requests are inside")
            client.stop_stream(cancel_requests=True)
        wait_until(lambda: self.server.metric("concertina_requests_in_flight") <= 1, "only this question is inside")

    def test_an_open_stream_does_not_keep_the_server(self):
        from harness import Server
        server = Server(self.MODELS, "--drain-announce", "0s")
        self.addCleanup(server.kill)
        with grpc_client.InferenceServerClient(server.grpc_url) as client:
            answers = self.open(client)
            client.async_stream_infer("affine", as_inputs({"x": ROWS}))
            self.assertIsNone(answers.get(timeout=PATIENCE)[1])
            server.terminate()
            self.assertEqual(server.wait(), 0, server.log_tail())


class Aio(GrpcTestCase):
    def test_the_asyncio_client(self):
        async def talk():
            async with aio_client.InferenceServerClient(self.server.grpc_url) as client:
                self.assertTrue(await client.is_server_ready())
                self.assertEqual((await client.get_model_metadata("affine")).name, "affine")

                async def one(number):
                    row = np.full((1, 4), number, dtype=np.float32)
                    result = await client.infer("affine", as_inputs({"x": row}), compression_algorithm="gzip")
                    self.assert_same(result.as_numpy("y"), 2 * row + 1)

                await asyncio.gather(*map(one, range(100)))
                with self.assertRaises(InferenceServerException) as caught:
                    await client.infer("nobody", as_inputs({"x": ROWS}))
                self.assertIn("nobody", caught.exception.message())

                async def requests():
                    for number in range(20):
                        row = np.full((1, 4), number, dtype=np.float32)
                        yield {"model_name": "affine", "inputs": as_inputs({"x": row}), "request_id": str(number)}

                seen = []
                async for result, error in client.stream_infer(requests()):
                    self.assertIsNone(error)
                    seen.append(int(result.get_response().id))
                self.assertEqual(seen, list(range(20)))

        asyncio.run(talk())
