"""The commands of README.md that speak to a server, run as they stand there but for the address."""
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import DEMO_MODELS, PATIENCE, ROOT, TEST_MODELS, ServerTestCase

TOKEN = "a-token-for-the-readme"
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


class Readme(ServerTestCase):
    OPTIONS = ("--admin-token", TOKEN)

    @classmethod
    def setUpClass(cls):
        cls.MODELS = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.MODELS)
        for model in (DEMO_MODELS / "magika", DEMO_MODELS / "minilm", TEST_MODELS / "affine"):
            (Path(cls.MODELS) / model.name).symlink_to(model.resolve())
        super().setUpClass()

    def shell(self, commands):
        """What the commands print; they run in the root of the repository, and none of them may fail."""
        for address in ("127.0.0.1:8000", "localhost:8000"):
            commands = commands.replace(address, self.server.url)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=ROOT, timeout=PATIENCE, text=True,
                              env=os.environ | {"CONCERTINA_ADMIN_TOKEN": TOKEN}, capture_output=True)
        self.assertEqual(done.returncode, 0, f"{commands}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_the_type_of_a_file(self):
        [block] = [block for block in BLOCKS if "/v2/models/magika/infer" in block]
        answer, best = self.shell(block).splitlines()
        self.assertTrue(answer.startswith('{"model_name":"magika","model_version":"1","outputs":['), answer)
        self.assertIn("'makefile'", best)

    def test_similar_texts(self):
        texts = (ROOT / "README.md").read_text()
        [curl] = [block for block in BLOCKS if "/similarity" in block]
        [client] = [block for block in BLOCKS if "OpenAI(" in block]
        for block, shown in ((curl, r"\n```\n(\[0\.6888.*?\])\n```"), (client, r"\n```\n( 1\.000 .*?)\n```")):
            [expected] = re.findall(shown, texts, re.DOTALL)
            numbers = lambda text: [float(number) for number in re.findall(r"-?\d\.\d+(?:e-?\d+)?", text)]
            printed = numbers(self.shell(block))
            self.assertEqual(len(printed), len(numbers(expected)))
            for got, wanted in zip(printed, numbers(expected)):
                self.assertAlmostEqual(got, wanted, delta=1e-3)

    def test_the_administration(self):
        lines = [line for block in BLOCKS for line in block.splitlines()
                 if line.startswith("curl ") and ("/admin/" in line or "/v2/repository/" in line)]
        self.assertGreaterEqual(len(lines), 4)
        for line in lines:
            with self.subTest(line):
                self.shell(line.replace("curl ", "curl -sS --fail-with-body ", 1))
