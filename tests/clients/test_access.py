"""TLS and API keys with real clients, and certificates and keys that change while the server runs."""
import http.client
import shutil
import ssl
import tempfile
import unittest
from pathlib import Path

import grpc
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from harness import PATIENCE, ROOT, TEST_MODELS, Server, as_inputs, as_outputs, wait_until
from test_grpc import as_inputs as as_grpc_inputs
from tritonclient.utils import InferenceServerException

CERTIFICATES = ROOT / "tests/tls"
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


class Guarded(Server):
    """A server that is asked by who trusts one certificate."""

    trusted = ssl.create_default_context(cafile=CERTIFICATES / "one.crt")

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=self.trusted)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()


class Access(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.use("one")
        (cls.folder / "keys").write_text("# one for each client\nalpha\n")
        cls.server = Guarded(TEST_MODELS, "--set", f"tls.certificate={cls.folder}/server.crt",
                             "--set", f"tls.key={cls.folder}/server.key",
                             "--set", f"access.key_file={cls.folder}/keys", "--api-keys", "omega")
        cls.addClassCleanup(cls.server.kill)

    @classmethod
    def use(cls, name):
        shutil.copy(CERTIFICATES / f"{name}.crt", cls.folder / "server.crt")
        shutil.copy(CERTIFICATES / f"{name}.key", cls.folder / "server.key")

    def status(self, key):
        return self.server.request("GET", "/v2", headers={"Authorization": f"Bearer {key}"})[0]

    def test_http_clients(self):
        client = http_client.InferenceServerClient(
            self.server.url, ssl=True, ssl_context_factory=lambda: self.server.trusted, network_timeout=PATIENCE)
        with client:
            for key in ("alpha", "omega"):
                headers = {"Authorization": f"Bearer {key}"}
                result = client.infer("affine", as_inputs({"x": ROWS}), headers=headers)
                np.testing.assert_array_equal(as_outputs(result)["y"], 2 * ROWS + 1)
            self.assertTrue(client.is_server_ready())
            with self.assertRaises(InferenceServerException) as caught:
                client.infer("affine", as_inputs({"x": ROWS}), headers={"Authorization": "Bearer beta"})
            self.assertEqual(caught.exception.status(), "401")
            self.assertIn("API key", caught.exception.message())

    def test_grpc_clients(self):
        with grpc_client.InferenceServerClient(self.server.grpc_url, ssl=True,
                                               root_certificates=str(CERTIFICATES / "one.crt")) as client:
            result = client.infer("affine", as_grpc_inputs({"x": ROWS}), headers={"authorization": "Bearer alpha"})
            np.testing.assert_array_equal(result.as_numpy("y"), 2 * ROWS + 1)
            with self.assertRaises(InferenceServerException) as caught:
                client.infer("affine", as_grpc_inputs({"x": ROWS}))
            self.assertEqual(caught.exception.status(), "StatusCode.UNAUTHENTICATED")

    def test_who_speaks_in_the_clear_or_trusts_another_is_not_served(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        self.addCleanup(connection.close)
        with self.assertRaises((http.client.HTTPException, OSError)):
            connection.request("GET", "/v2/health/live")
            connection.getresponse()
        stranger = ssl.create_default_context(cafile=CERTIFICATES / "two.crt")
        connection = http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=PATIENCE, context=stranger)
        self.addCleanup(connection.close)
        self.assertRaises(ssl.SSLError, connection.request, "GET", "/v2/health/live")
        channel = grpc.insecure_channel(self.server.grpc_url)
        self.addCleanup(channel.close)
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        self.assertRaises(grpc.RpcError, call, b"", timeout=5)


class Changes(Access):
    """What changes in the files holds without a restart, and open connections live on."""

    test_http_clients = test_grpc_clients = test_who_speaks_in_the_clear_or_trusts_another_is_not_served = None

    def test_changes(self):
        kept = http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=PATIENCE, context=self.server.trusted)
        self.addCleanup(kept.close)
        kept.request("GET", "/v2/health/live")
        kept.getresponse().read()
        socket = kept.sock
        self.assertEqual(self.status("alpha"), 200)
        (self.folder / "keys").write_text("gamma\n")
        wait_until(lambda: self.status("gamma") == 200, "the new key opens")
        self.assertEqual((self.status("alpha"), self.status("omega")), (401, 200))

        self.use("two")
        stranger = ssl.create_default_context(cafile=CERTIFICATES / "two.crt")

        def shown():
            connection = http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=PATIENCE, context=stranger)
            try:
                connection.request("GET", "/v2/health/live")
                return connection.getresponse().status == 200
            except ssl.SSLError:
                return False
            finally:
                connection.close()

        wait_until(shown, "the new certificate is shown")
        kept.request("GET", "/v2/health/live")
        self.assertEqual((kept.getresponse().status, kept.sock), (200, socket))
