"""The committed test models are what their script writes."""
import subprocess
import sys
import unittest

from harness import TEST_MODELS


class GeneratedModels(unittest.TestCase):
    def test_the_script_writes_the_same_bytes(self):
        subprocess.run([sys.executable, str(TEST_MODELS / "generate.py"), "--check"], check=True)
