"""The classification extension as tritonclient asks for it, with the labels of a file."""
import shutil
import tempfile
from pathlib import Path

import numpy as np
import tritonclient.http as http_client
from harness import TEST_MODELS, ServerTestCase, as_inputs

X = np.array([[3, 1, 2, 0], [0, 5, 6, 7]], dtype=np.float32)


class Classification(ServerTestCase):
    @classmethod
    def setUpClass(cls):
        cls.MODELS = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.MODELS)
        for name, labels in (("plain", ""), ("labelled", "cat\ndog\nbird\n")):
            shutil.copytree(TEST_MODELS / "affine", Path(cls.MODELS) / name)
            if labels:
                (Path(cls.MODELS) / name / "labels.txt").write_text(labels)
                (Path(cls.MODELS) / name / "model.toml").write_text('[labels]\ny = "labels.txt"\n')
        super().setUpClass()

    def classes(self, model, count, binary=True):
        outputs = [http_client.InferRequestedOutput("y", binary_data=binary, class_count=count)]
        result = self.client.infer(model, as_inputs({"x": X}), outputs=outputs)
        self.assertEqual(result.get_output("y")["datatype"], "BYTES")
        values = result.as_numpy("y")
        return [[value.decode() if isinstance(value, bytes) else value for value in row] for row in values]

    def test_the_largest_come_first_with_their_labels(self):
        for binary in (True, False):
            self.assertEqual(self.classes("labelled", 2, binary), [["7.000000:0:cat", "5.000000:2:bird"],
                                                                   ["15.000000:3", "13.000000:2:bird"]])
            self.assertEqual(self.classes("plain", 1, binary), [["7.000000:0"], ["15.000000:3"]])
        self.assertEqual([len(row) for row in self.classes("plain", 99)], [4, 4])

    def test_the_configuration_names_the_file(self):
        self.assertEqual(self.client.get_model_config("labelled")["output"][0]["label_filename"], "labels.txt")
        self.assertIn("classification", self.client.get_server_metadata()["extensions"])
