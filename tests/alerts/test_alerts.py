"""The alert rules and the dashboard's queries, by Prometheus' own tool. PROMTOOL names it where it is not on the PATH."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "config/prometheus"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


@unittest.skipUnless(PROMTOOL, "no promtool here: it is in Debian's package prometheus, or name it with PROMTOOL")
class Rules(unittest.TestCase):
    def promtool(self, *arguments):
        done = subprocess.run([PROMTOOL, *arguments], cwd=RULES, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_the_rules_are_valid(self):
        self.assertIn("8 rules found", self.promtool("check", "rules", "alerts.yaml"))

    def test_each_rule_fires_on_what_it_is_for_and_on_nothing_else(self):
        self.promtool("test", "rules", "alerts_test.yaml")

    def test_a_rule_that_does_not_fire_would_be_noticed(self):
        text = (RULES / "alerts.yaml").read_text()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "alerts.yaml").write_text(text.replace("concertina_saturation_pod[1m]) > 1", "concertina_saturation_pod[1m]) > 2"))
            shutil.copy(RULES / "alerts_test.yaml", folder)
            done = subprocess.run([PROMTOOL, "test", "rules", "alerts_test.yaml"], cwd=folder, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("ConcertinaSaturated", done.stdout + done.stderr)

    def test_the_queries_of_the_dashboard_are_valid(self):
        dashboard = json.loads((ROOT / "config/grafana/concertina.json").read_text())
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
        self.assertGreater(len(queries), 20)
        rules = [{"record": f"query{number}", "expr": query.replace("$__rate_interval", "1m")} for number, query in enumerate(queries)]
        with tempfile.TemporaryDirectory() as folder:
            # JSON is YAML.
            path = Path(folder) / "queries.yaml"
            path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
            self.assertIn(f"{len(queries)} rules found", self.promtool("check", "rules", str(path)))


if __name__ == "__main__":
    unittest.main()
