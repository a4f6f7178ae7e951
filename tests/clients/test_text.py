"""Texts in, vectors out: OpenAI's own client against the served minilm, compared with a plain reading of the formulas."""
import asyncio
import base64
import itertools
import json

import numpy as np
import openai
from harness import DEMO_MODELS, PATIENCE, ServerTestCase, in_threads
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
