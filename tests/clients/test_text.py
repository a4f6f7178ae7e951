"""Texts in, vectors and scores out: OpenAI's own client and TEI's routes, compared with a plain reading of the formulas."""
import asyncio
import base64
import concurrent.futures
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import unittest
from pathlib import Path

import numpy as np
import onnx
import openai
from harness import DEMO_MODELS, PATIENCE, ROOT, Server, ServerTestCase, binary, in_threads
from reference_minilm import MiniLm
from test_demo_models import SIMILARITIES, TEXTS, encode

# The shortest and the longest that one batch of lengths holds, and more of them than one part of a request.
WORDS = "the accordion expands and contracts with the bellows of a free reed instrument from the old town".split()
MANY = [" ".join(itertools.islice(itertools.cycle(WORDS[shift:]), count))
        for shift, count in enumerate(itertools.islice(itertools.cycle([1, 60, 7, 90, 15, 31, 2, 44]), 16))]


def reference():
    """The embeddings of TEXTS, [texts, 384]."""
    model = MiniLm()
    return np.array([model.embed(*[array[0] for array in encode(text).values()]) for text in TEXTS])


class OpenAi(ServerTestCase):
    MODELS = DEMO_MODELS

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = reference()
        cls.openai = cls.connect()
        cls.addClassCleanup(cls.openai.close)

    @classmethod
    def connect(cls):
        """A client that shows every failure at once."""
        return openai.OpenAI(base_url=f"http://{cls.server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def embed(self, texts, client=None, **options):
        """The vectors of the client's answer, as it unpacks them."""
        answer = (client or self.openai).embeddings.create(model="minilm", input=texts, **options)
        self.assertEqual([entry.index for entry in answer.data], list(range(len(answer.data))))
        # Of what was asked for in so many words the client unpacks nothing.
        unpack = (lambda text: np.frombuffer(base64.b64decode(text), "<f4")) if "base64" in options.values() else np.array
        return np.array([unpack(entry.embedding) for entry in answer.data])

    def assert_close(self, actual, expected, tolerance=1e-5):
        self.assertEqual(actual.shape, expected.shape)
        self.assertLess(np.abs(actual - expected).max(), tolerance)

    def test_similarities_are_those_of_the_formulas(self):
        vectors = self.embed(TEXTS)
        self.assert_close(vectors, self.expected)
        for (one, other), similarity in SIMILARITIES.items():
            self.assertAlmostEqual(vectors[one] @ vectors[other], similarity, places=4)
        order = sorted(SIMILARITIES, key=lambda pair: -(vectors[pair[0]] @ vectors[pair[1]]))
        self.assertEqual(order, sorted(SIMILARITIES, key=lambda pair: -SIMILARITIES[pair]))

    def test_every_form_of_request_and_answer_is_the_same_vector(self):
        ids = [encode(text)["input_ids"][0].tolist() for text in TEXTS]
        for vectors in (self.embed(TEXTS, encoding_format="float"), self.embed(TEXTS, encoding_format="base64"),
                        self.embed(ids), np.vstack([self.embed(text) for text in TEXTS]),
                        np.vstack([self.embed(text) for text in ids])):
            self.assert_close(vectors, self.expected)

    def test_fewer_dimensions_are_the_first_ones_at_unit_length(self):
        short = self.expected[:, :64]
        self.assert_close(self.embed(TEXTS, dimensions=64), short / np.linalg.norm(short, axis=1, keepdims=True))

    def test_usage_counts_tokens(self):
        answer = self.openai.embeddings.create(model="minilm", input=TEXTS)
        tokens = sum(encode(text)["input_ids"].size for text in TEXTS)
        self.assertEqual((answer.usage.prompt_tokens, answer.usage.total_tokens), (tokens, tokens))
        self.assertEqual((answer.model, answer.object), ("minilm", "list"))

    def test_a_large_request_keeps_its_order_over_all_its_batches(self):
        single = np.vstack([self.embed(text) for text in MANY])
        picks = [(7 * number) % len(MANY) for number in range(400)]
        self.assert_close(self.embed([MANY[pick] for pick in picks]), single[picks])

    def test_64_clients_at_once_get_their_own_vectors(self):
        before = self.server.metric('concertina_requests_total{code="ok",model="minilm",version="1"}')

        def work(number):
            client = self.connect()
            try:
                for turn in range(4):
                    which = [(number + turn) % len(TEXTS), (number * 3 + turn) % len(TEXTS)]
                    self.assert_close(self.embed([TEXTS[at] for at in which], client), self.expected[which])
            finally:
                client.close()

        in_threads(64, work)
        after = self.server.metric('concertina_requests_total{code="ok",model="minilm",version="1"}')
        self.assertEqual(after - before, 64 * 4)

    def test_the_async_client(self):
        async def ask():
            url = f"http://{self.server.url}/openai/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
                calls = (client.embeddings.create(model="minilm", input=text) for text in TEXTS)
                return await asyncio.gather(*calls)

        answers = asyncio.run(ask())
        self.assert_close(np.array([answer.data[0].embedding for answer in answers]), self.expected)

    def test_models_are_listed_and_found(self):
        names = [model.id for model in self.openai.models.list()]
        self.assertIn("minilm", names)
        self.assertEqual(self.openai.models.retrieve("minilm").id, "minilm")

    def test_failures_raise_what_the_client_knows(self):
        for options, kind, param in [
            ({"model": "nothing", "input": "a"}, openai.NotFoundError, "model"),
            ({"model": "magika", "input": "a"}, openai.BadRequestError, "model"),
            ({"model": "minilm", "input": ""}, openai.BadRequestError, "input"),
            ({"model": "minilm", "input": []}, openai.BadRequestError, "input"),
            ({"model": "minilm", "input": ["a", "word " * 600]}, openai.BadRequestError, "input"),
            ({"model": "minilm", "input": [[101, 40000, 102]]}, openai.BadRequestError, "input"),
            ({"model": "minilm", "input": "a", "dimensions": 385}, openai.BadRequestError, "dimensions"),
        ]:
            with self.subTest(options=str(options)[:60]), self.assertRaises(kind) as caught:
                self.openai.embeddings.create(**options)
            self.assertEqual(caught.exception.param, param)
            self.assertEqual(caught.exception.type, "invalid_request_error")
            self.assertTrue(caught.exception.code)

    def test_a_body_that_is_not_json_is_an_error_of_the_same_form(self):
        status, _, body = self.server.request("POST", "/v1/embeddings", b"{")
        self.assertEqual(status, 400)
        self.assertEqual(json.loads(body)["error"]["type"], "invalid_request_error")


class Guarded(ServerTestCase):
    MODELS = DEMO_MODELS / "minilm"
    OPTIONS = ("--api-keys", "one,two")

    def test_the_client_brings_its_key(self):
        for key, enters in (("two", True), ("three", False)):
            with openai.OpenAI(base_url=f"http://{self.server.url}/v1", api_key=key, max_retries=0) as client:
                if enters:
                    self.assertEqual(len(client.embeddings.create(model="minilm", input="a").data[0].embedding), 384)
                    continue
                with self.assertRaises(openai.AuthenticationError):
                    client.embeddings.create(model="minilm", input="a")


def scorer(folder, labels, table):
    """A model whose scores for a text are the sums of what `table` gives its tokens, [vocabulary, labels]."""
    node = onnx.helper.make_node
    tensor = onnx.helper.make_tensor_value_info
    nodes = [node("Gather", ["table", "input_ids"], ["each"]), node("Cast", ["attention_mask"], ["seen"], to=onnx.TensorProto.FLOAT),
             node("Unsqueeze", ["seen", "last"], ["column"]), node("Mul", ["each", "column"], ["counted"]),
             node("ReduceSum", ["counted", "tokens"], ["logits"], keepdims=0)]
    inputs = [tensor(name, onnx.TensorProto.INT64, ["batch", "sequence"]) for name in ("input_ids", "attention_mask")]
    constants = [onnx.numpy_helper.from_array(np.array(table, "f4"), "table"),
                 onnx.numpy_helper.from_array(np.array([2], "i8"), "last"), onnx.numpy_helper.from_array(np.array([1], "i8"), "tokens")]
    outputs = [tensor("logits", onnx.TensorProto.FLOAT, ["batch", len(labels)])]
    graph = onnx.helper.make_graph(nodes, "scorer", inputs, outputs, constants)
    (folder / "1").mkdir(parents=True)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), folder / "1/model.onnx")
    shutil.copy(ROOT / "tests/text/tokenizer.json", folder)
    config = {"architectures": ["AnyForSequenceClassification"], "id2label": dict(enumerate(labels)), "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))


class Tei(ServerTestCase):
    """The routes of Text Embeddings Inference, by plain requests as their documentation shows them."""

    @classmethod
    def setUpClass(cls):
        cls.MODELS = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.MODELS)
        (cls.MODELS / "minilm").symlink_to((DEMO_MODELS / "minilm").resolve())
        # The words a, b, c, d and é of tests/text/tokenizer.json are the tokens 10 to 14.
        table = np.zeros((15, 1))
        table[10:15, 0] = [1, -2, 0.5, 3, 0]
        scorer(cls.MODELS / "ranker", ["score"], table)
        scorer(cls.MODELS / "classifier", ["no", "yes"], np.hstack([table, -table]))
        super().setUpClass()
        cls.expected = reference()

    def ask(self, path, status=200, **body):
        got, _, answer = self.server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self.assertEqual(got, status, answer)
        return json.loads(answer)

    def test_embed_and_similarity_are_those_of_the_formulas(self):
        for path in ("/embed", "/tei/minilm/embed"):
            self.assertLess(np.abs(np.array(self.ask(path, inputs=TEXTS)) - self.expected).max(), 1e-5)
        for (one, other), similarity in SIMILARITIES.items():
            answer = self.ask("/similarity", inputs={"source_sentence": TEXTS[one], "sentences": [TEXTS[other]]})
            self.assertAlmostEqual(answer[0], similarity, places=4)

    def test_embed_all_has_a_vector_for_each_token(self):
        model = MiniLm()
        for text, vectors in zip(TEXTS, self.ask("/embed_all", inputs=TEXTS)):
            expected = model.tokens(*[array[0] for array in encode(text).values()])
            self.assertEqual(np.shape(vectors), expected.shape)
            self.assertLess(np.abs(vectors - expected).max(), 1e-4)

    def test_tokens_are_those_of_the_tokenizer(self):
        for text, tokens in zip(TEXTS, self.ask("/tei/minilm/tokenize", inputs=TEXTS)):
            self.assertEqual([token["id"] for token in tokens], encode(text)["input_ids"][0].tolist())
            words = [text[token["start"]:token["stop"]] for token in tokens if not token["special"]]
            self.assertEqual(words, [token["text"] for token in tokens if not token["special"]])
        self.assertEqual(self.ask("/tei/minilm/decode", ids=[101, 7592, 102]), ["hello"])

    def test_rerank_and_predict_are_the_sums_of_the_table(self):
        answer = self.ask("/rerank", query="a", texts=["b", "d", "c"], raw_scores=True, return_text=True)
        self.assertEqual([(entry["index"], entry["score"], entry["text"]) for entry in answer],
                         [(1, 4.0, "d"), (2, 1.5, "c"), (0, -1.0, "b")])
        answer = self.ask("/rerank", query="a", texts=["b"])
        self.assertAlmostEqual(answer[0]["score"], 1 / (1 + np.exp(1)), places=6)
        answer = self.ask("/tei/classifier/predict", inputs=[["a"], ["b", "b"]], raw_scores=True)
        self.assertEqual(answer, [[{"score": 1.0, "label": "no"}, {"score": -1.0, "label": "yes"}],
                                  [{"score": 4.0, "label": "yes"}, {"score": -4.0, "label": "no"}]])

    def test_long_texts_are_cut_and_failures_have_their_kind(self):
        info = json.loads(self.server.request("GET", "/tei/minilm/info")[2])
        long = "word " * (info["max_input_length"] + 50)
        cut = "word " * (info["max_input_length"] - 2)
        vectors = np.array(self.ask("/embed", inputs=[long, cut]))
        self.assertLess(np.abs(vectors[0] - vectors[1]).max(), 1e-6)
        refused = self.ask("/embed", 422, inputs=long, truncate=False)
        self.assertEqual(refused["error_type"], "Validation")
        self.assertIn(f"at most {info['max_input_length']}", refused["error"])
        self.assertEqual(self.ask("/tei/minilm/rerank", 424, query="a", texts=["b"])["error_type"], "Backend")
        self.assertEqual(info["model_type"], {"embedding": {"pooling": "none"}})


class Unloading(ServerTestCase):
    """Two models of texts, one of which comes and goes while both are asked."""

    TOKEN = {"Authorization": "Bearer t"}
    OPTIONS = ("--admin-token", "t", "--set", "model.warmup.seconds=0")
    ASKED = [["b", "c"] * 150, ["b", "d", "a"]]
    SCORES = [[1 - 2, 1 + 0.5] * 150, [1 - 2, 1 + 3, 1 + 1]]

    @classmethod
    def setUpClass(cls):
        cls.MODELS = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.MODELS)
        table = np.zeros((15, 1))
        table[10:14, 0] = [1, -2, 0.5, 3]
        for name in ("stays", "goes"):
            scorer(cls.MODELS / name, ["score"], table)
        super().setUpClass()

    def ask(self, model, which):
        """The status, and the scores in the order of the texts if there are any."""
        body = json.dumps({"query": "a", "texts": self.ASKED[which], "raw_scores": True})
        status, _, answer = self.server.request("POST", f"/tei/{model}/rerank", body, {"Content-Type": "application/json"})
        if status != 200:
            return status, json.loads(answer)["error"]
        return status, [entry["score"] for entry in sorted(json.loads(answer), key=lambda entry: entry["index"])]

    def control(self, action):
        self.assertEqual(self.server.request("POST", f"/v2/repository/models/goes/{action}", b"{}", self.TOKEN)[0], 200)

    def test_every_request_is_answered_whole_or_told_that_the_model_is_gone(self):
        over, faults = threading.Event(), []

        def load(number):
            model, which = ("stays", "goes")[number % 2], number // 2 % 2
            while not over.is_set():
                status, answer = self.ask(model, which)
                if status == 200 and answer == self.SCORES[which]:
                    continue
                if model == "stays" or status not in (404, 503):
                    faults.append((model, status, answer))
                    return

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(load, number) for number in range(4)]
            try:
                for _ in range(3):
                    self.control("unload")
                    status, answer = self.ask("goes", 1)
                    self.assertEqual(status, 503)
                    self.assertIn("goes", answer)
                    self.control("load")
                    self.assertEqual(self.ask("goes", 1), (200, self.SCORES[1]))
            finally:
                over.set()
            for one in loads:
                one.result(PATIENCE)
        self.assertEqual(faults, [])


class Add(unittest.TestCase):
    def test_a_folder_of_the_hub_is_served_after_one_command(self):
        with tempfile.TemporaryDirectory() as folder:
            hub, repository = Path(folder, "hub/all-MiniLM"), Path(folder, "models")
            (hub / "onnx").mkdir(parents=True)
            repository.mkdir()
            (hub / "onnx/model.onnx").symlink_to((DEMO_MODELS / "minilm/1/model.onnx").resolve())
            for path in (DEMO_MODELS / "minilm").rglob("*.json"):
                target = hub / path.relative_to(DEMO_MODELS / "minilm")
                target.parent.mkdir(exist_ok=True)
                shutil.copy(path, target)
            runtime = next((ROOT / ".setup/onnxruntime").glob("libonnxruntime.so.*"), "")
            command = [binary(), "add", str(hub), "--models", str(repository), "--name", "mini"]
            done = subprocess.run(command, env={"CONCERTINA_ONNXRUNTIME": str(runtime)} | os.environ, capture_output=True,
                                  text=True, timeout=PATIENCE)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("vectors from 'sentence_embedding', pooling none", done.stdout)
            server = Server(repository)
            try:
                status, _, body = server.request("POST", "/embed", json.dumps({"inputs": TEXTS}))
                self.assertEqual(status, 200, body)
                self.assertLess(np.abs(np.array(json.loads(body)) - reference()).max(), 1e-5)
            finally:
                server.kill()
