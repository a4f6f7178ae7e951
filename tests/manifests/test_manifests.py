"""Every variant of config/kubernetes renders, is valid to the letter, and says what the server needs it to say."""
import os
import re
import shutil
import subprocess
import unittest
from pathlib import Path

import jsonschema
import yaml
from schemas import schemas

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "config/kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
PACKAGES = os.environ.get("MANIFEST_SCHEMAS", ROOT / ".setup/schemas")


def render(overlay):
    """The objects of one overlay, by `kustomize` or by the one inside `kubectl`."""
    tool = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(tool[0]) is None:
        raise unittest.SkipTest("SKIPPED: neither kustomize nor kubectl is installed, so no variant was rendered or checked")
    found = subprocess.run([*tool, str(FOLDER / "overlays" / overlay)], capture_output=True, text=True)
    if found.returncode:
        raise AssertionError(f"{overlay}: {found.stderr}")
    return list(yaml.safe_load_all(found.stdout))


def faults(objects, document, kinds):
    """Everything that is wrong, each with the object and the field."""
    for thing in objects:
        name = f"{thing.get('kind')} {thing.get('metadata', {}).get('name')}"
        known = kinds.get((thing.get("apiVersion"), thing.get("kind")))
        if known is None:
            yield f"{name}: unknown kind of {thing.get('apiVersion')}"
            continue
        validator = jsonschema.Draft202012Validator(document | {"$ref": f"#/$defs/{known}"})
        for error in validator.iter_errors(thing):
            yield f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message}"


class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.document, cls.kinds = schemas(PACKAGES)
        cls.rendered = {overlay: render(overlay) for overlay in OVERLAYS}

    def of(self, overlay, kind):
        return [thing for thing in self.rendered[overlay] if thing["kind"] == kind]

    def test_there_is_a_variant_for_each_device_and_for_kserve(self):
        self.assertEqual(OVERLAYS, ["cpu", "gpu", "gpu-mig", "gpu-shared", "kserve"])

    def test_every_object_is_valid_to_the_letter(self):
        for overlay, objects in self.rendered.items():
            with self.subTest(overlay):
                self.assertEqual(list(faults(objects, self.document, self.kinds)), [])

    def test_the_check_finds_what_is_wrong(self):
        """Misspelt, of the wrong type, left out, or of no known kind: in each family of objects."""
        break_ = {
            "Deployment": lambda thing: thing["spec"]["template"]["spec"]["containers"][0].update(redinessProbe={}),
            "Service": lambda thing: thing["spec"]["ports"][0].update(port="http"),
            "HorizontalPodAutoscaler": lambda thing: thing["spec"].pop("maxReplicas"),
            "PodMonitor": lambda thing: thing["spec"]["podMetricsEndpoints"][0].update(intervall="5s"),
            "PodDisruptionBudget": lambda thing: thing.update(apiVersion="policy/v1beta1"),
        }
        deep = {
            "ScaledObject": lambda thing: thing["spec"]["triggers"][0]["metadata"].update(threshold=0.7),
            "ClusterServingRuntime": lambda thing: thing["spec"]["containers"][0].update(imagee="x"),
            "InferenceService": lambda thing: thing["spec"]["predictor"]["model"].update(modelFormat={"nam": "onnx"}),
        }
        for overlay, table in [("cpu", break_), ("kserve", deep)]:
            for kind, change in table.items():
                thing = yaml.safe_load(yaml.safe_dump(self.of(overlay, kind)[0]))
                change(thing)
                with self.subTest(kind):
                    self.assertNotEqual(list(faults([thing], self.document, self.kinds)), [])

    def test_pods_may_do_nothing_that_they_need_not(self):
        for overlay in OVERLAYS:
            for deployment in self.of(overlay, "Deployment"):
                pod = deployment["spec"]["template"]["spec"]
                self.assertTrue(pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"])
            for container in self.containers(overlay):
                self.assertEqual(container["securityContext"]["capabilities"], {"drop": ["ALL"]})
                self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"])
                self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])

    def containers(self, overlay):
        for thing in self.of(overlay, "Deployment"):
            yield from thing["spec"]["template"]["spec"]["containers"]
        for thing in self.of(overlay, "ClusterServingRuntime"):
            yield from thing["spec"]["containers"]

    def test_memory_is_promised_and_not_only_allowed_and_processors_are_never_throttled(self):
        for overlay in OVERLAYS:
            for container in self.containers(overlay):
                requests, limits = (container["resources"][kind] for kind in ("requests", "limits"))
                self.assertEqual(requests["memory"], limits["memory"])
                self.assertNotIn("cpu", limits)
                gpus = lambda amounts: {name: amount for name, amount in amounts.items() if name.startswith("nvidia.com/")}
                self.assertEqual(gpus(requests), gpus(limits))

    def test_each_device_has_its_own_resource(self):
        expected = {"cpu": [], "gpu": ["nvidia.com/gpu"], "gpu-mig": ["nvidia.com/mig-1g.18gb"], "gpu-shared": ["nvidia.com/gpu.shared"]}
        for overlay, names in expected.items():
            (container,) = self.containers(overlay)
            self.assertEqual([name for name in container["resources"]["limits"] if "/" in name], names)

    def test_a_pod_is_given_longer_than_it_drains(self):
        for overlay in OVERLAYS:
            for deployment in self.of(overlay, "Deployment"):
                pod = deployment["spec"]["template"]["spec"]
                given = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
                seconds = [int(re.fullmatch(r"(\d+)s", given[f"CONCERTINA_DRAIN_{part}"])[1]) for part in ("ANNOUNCE", "GRACE")]
                self.assertGreater(pod["terminationGracePeriodSeconds"], sum(seconds))

    def test_only_liveness_ignores_readiness(self):
        for overlay in OVERLAYS:
            for container in self.containers(overlay):
                for probe, path in [("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")]:
                    if probe in container:
                        self.assertEqual(container[probe]["httpGet"]["path"], f"/v2/health/{path}")

    def test_a_gpu_is_never_waited_for_by_the_pod_that_replaces_its_holder(self):
        for overlay in ("gpu", "gpu-mig", "gpu-shared"):
            (deployment,) = self.of(overlay, "Deployment")
            self.assertEqual(deployment["spec"]["strategy"]["rollingUpdate"], {"maxSurge": 0, "maxUnavailable": 1})

    def test_whoever_is_scaled_has_one_autoscaler_and_no_number_of_its_own(self):
        for overlay in OVERLAYS:
            scalers = self.of(overlay, "HorizontalPodAutoscaler") + self.of(overlay, "ScaledObject")
            self.assertEqual(len(scalers), 0 if overlay == "gpu-shared" else 1)
            for deployment in self.of(overlay, "Deployment"):
                self.assertEqual("replicas" in deployment["spec"], not scalers)
                for scaler in scalers:
                    self.assertEqual(scaler["spec"]["scaleTargetRef"]["name"], deployment["metadata"]["name"])

    def test_queries_of_the_autoscalers_ask_for_the_total(self):
        for overlay in OVERLAYS:
            for scaler in self.of(overlay, "ScaledObject"):
                for trigger in scaler["spec"]["triggers"]:
                    self.assertTrue(trigger["metadata"]["query"].startswith("sum("))
                    self.assertEqual(trigger["metadata"]["ignoreNullValues"], "false")

    def test_the_adapter_offers_the_metric_that_the_autoscaler_asks_for(self):
        (rule,) = yaml.safe_load((FOLDER / "adapter/values.yaml").read_text())["rules"]["custom"]
        (scaler,) = self.of("cpu", "HorizontalPodAutoscaler")
        self.assertEqual(rule["name"]["as"], scaler["spec"]["metrics"][0]["pods"]["metric"]["name"])
        self.assertIn("by (<<.GroupBy>>)", rule["metricsQuery"])


class Dockerfile(unittest.TestCase):
    def test_hadolint_has_no_complaint(self):
        tool = shutil.which("hadolint", path=os.environ.get("MANIFEST_TOOLS", "") + os.pathsep + os.environ["PATH"])
        self.assertIsNotNone(tool, "hadolint is not installed: `make test-manifests` does that")
        found = subprocess.run([tool, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
        self.assertEqual((found.returncode, found.stdout), (0, ""))


if __name__ == "__main__":
    unittest.main()
