"""A property-based client, schemathesis, asks all that /openapi.json describes, and all that it does not allow."""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import PATIENCE, ServerTestCase

TOKEN = "correct-horse-battery"
# Not that whatever fits its schema is accepted: no schema knows what a model takes.
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
          "response_schema_conformance", "negative_data_rejection", "missing_required_header", "unsupported_method",
          "allow_header_conformance", "ignored_auth")
# 501 is the documented answer for the extensions that this server does not have; every other 5xx is a failure.
CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 501]\n'
CONTROL = "^/(admin|v2/repository/models)/"


class OpenApi(ServerTestCase):
    OPTIONS = ("--admin-token", TOKEN, "--set", "model.warmup.seconds=0", "--cache", "")

    def fuzz(self, seconds, *options):
        """Run schemathesis for so long; what it has found is the failure's text."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "schemathesis.toml").write_text(CONFIG)
            command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "run",
                       f"http://{self.server.url}/openapi.json", "--phases", "coverage,fuzzing", "--mode", "all",
                       "--checks", ",".join(CHECKS), "--max-time", str(seconds), "--seed", "1", "--no-shrink", "--no-color",
                       "--continue-on-failure", "--warnings", "off", *options]
            done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE)
        self.assertEqual(done.returncode, 0, done.stdout[-20000:])
        self.assertRegex(done.stdout, r"[0-9]{3,} generated")
        self.assertTrue(self.server.alive())
        self.assertNotIn("panicked", self.server.log_tail())

    def test_1_whatever_is_asked_the_answer_is_as_described(self):
        self.fuzz(15, "--exclude-path-regex", CONTROL)
        x = np.ones((1, 4), dtype=np.float32)
        self.assert_same(self.infer("affine", {"x": x})["y"], 2 * x + 1)

    def test_2_so_is_that_of_what_the_admin_token_guards(self):
        self.fuzz(8, "--include-path-regex", CONTROL, "--header", f"Authorization: Bearer {TOKEN}")
