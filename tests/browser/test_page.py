"""The live page in a real browser, over a server under load whose memory is squeezed.

SCREENSHOT names a folder where to keep page.png, page-dark.png and page-phone.png.
"""
import http.client
import json
import os
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))

from devtools import Browser, executable, wait_until  # noqa: E402
from harness import Server  # noqa: E402

MODEL = Path(__file__).resolve().parent / "costly"  # Large batches pay, and rows cost much memory.
TOKEN = "only-for-this-test"
ROWS = 24
CHROMIUM = executable()


class Load:
    """Clients that ask again as soon as they are answered. Counts answers and what was wrong."""

    def __init__(self, port, clients):
        self.port, self.ending, self.answers, self.wrong = port, threading.Event(), 0, []
        self.threads = [threading.Thread(target=self.ask, daemon=True) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def ask(self):
        values = [float(number) for number in range(ROWS)]
        body = json.dumps({"inputs": [{"name": "x", "shape": [ROWS, 1], "datatype": "FP32", "data": values}]})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.ending.is_set():
            connection.request("POST", "/v2/models/costly/infer", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == 200 and json.loads(text)["outputs"][0]["data"] == [3 * value for value in values]:
                self.answers += 1
            else:
                self.wrong.append(text)
        connection.close()

    def end(self):
        self.ending.set()
        for thread in self.threads:
            thread.join()


@unittest.skipUnless(CHROMIUM, "no Chromium here: install it, or name it with CHROMIUM")
class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.environ["CONCERTINA_ADMIN_TOKEN"] = TOKEN
        cls.addClassCleanup(os.environ.pop, "CONCERTINA_ADMIN_TOKEN")
        cls.server = Server(MODEL, "--model-name", "costly", "--set", "model.instances=1", "--set", "model.max_batch_size=64", "--cache", "")
        cls.addClassCleanup(cls.server.kill)

    def setUp(self):
        self.browser = Browser(CHROMIUM)
        self.addCleanup(self.browser.close)
        self.browser.size(1280, 900)

    def show(self):
        self.browser.open(f"http://{self.server.url}/")
        wait_until(lambda: self.browser.run("document.getElementById('state').textContent") == "Live", "the page is live")

    def tile(self, name):
        return self.browser.run(
            f"[...document.querySelectorAll('#tiles div')].find(t => t.querySelector('dt').textContent === {json.dumps(name)})"
            ".querySelector('dd').textContent")

    def legend(self, chart, name):
        return self.browser.run(
            f"(() => {{ const figure = [...document.querySelectorAll('figure')].find(f => f.querySelector('h4').textContent === {json.dumps(chart)});"
            f"return [...figure.querySelectorAll('.legend div')].find(d => d.querySelector('dt').textContent === {json.dumps(name)})"
            ".querySelector('dd').textContent })()")

    def events(self):
        return self.browser.run("[...document.querySelectorAll('#events li')].map(li => li.textContent).join('\\n')")

    def limit(self, limit):
        status, _, body = self.server.request("POST", "/admin/memory", json.dumps({"limit": limit}),
                                              {"Authorization": f"Bearer {TOKEN}"})
        self.assertEqual(status, 200, body)

    def keep(self, name, height):
        if folder := os.environ.get("SCREENSHOT"):
            self.browser.screenshot(Path(folder) / name, height)

    def test_it_shows_a_squeeze_as_it_happens(self):
        load = Load(self.server.port, 6)
        self.addCleanup(load.end)
        self.addCleanup(self.limit, "auto")
        self.show()
        wait_until(lambda: self.tile("Answers per second") not in ("–", "0"), "answers are counted")
        self.assertTrue(self.tile("p99").endswith("s"), self.tile("p99"))
        wait_until(lambda: self.tile("Cut by memory") == "0%", "nothing is cut by memory yet")
        self.assertEqual(self.legend("What limited batches", "bytes"), "0%")
        before = wait_until(lambda: self.number("Rows per batch", "mean"), "batches have a size")
        time.sleep(8)  # So that the picture has a before.
        self.limit("10MiB")
        wait_until(lambda: "memory makes batches smaller" in self.events(), "the page says that memory is short")
        self.assertIn("the limit went from", self.events())
        wait_until(lambda: int(self.tile("Cut by memory").rstrip("%")) > 50, "the tile says how many batches are cut")
        during = wait_until(lambda: self.number("Rows per batch", "mean") < before / 2 and self.number("Rows per batch", "mean"),
                            "batches are smaller")
        self.assertGreater(during, 0)
        self.assertEqual(self.legend("Device 0", "limit"), "10.0 MiB")
        # What the page says is what the metrics say.
        said = self.server.metric('concertina_memory_bytes{device="0",kind="limit"}')
        self.assertEqual(said, 10 << 20)
        time.sleep(8)
        self.limit("auto")
        wait_until(lambda: "memory no longer makes batches smaller" in self.events(), "the page says that it has passed")
        wait_until(lambda: self.number("Rows per batch", "mean") > 0.8 * before, "batches are large again")
        time.sleep(4)
        self.keep("page.png", 1500)
        self.browser.scheme("dark")
        self.keep("page-dark.png", 1500)
        self.assertEqual(load.wrong, [])
        self.assertEqual(self.browser.faults(), [])

    def number(self, chart, name):
        text = self.legend(chart, name).split(" ")[0].replace(",", "")
        return 0.0 if text == "–" else float(text)

    def test_it_asks_nobody_else_and_nobody_at_all_while_nobody_looks(self):
        self.show()
        wait_until(lambda: len(self.browser.requests()) >= 4, "it asks again and again")
        root = f"http://{self.server.url}"
        self.assertEqual(set(self.browser.requests()) - {"data:,"}, {f"{root}/", f"{root}/metrics"})
        for begin, end in (("document.getElementById('pause').click()", "document.getElementById('pause').click()"),
                           (self.hidden(True), self.hidden(False))):
            self.browser.run(begin)
            time.sleep(1.5)  # A request that was under way.
            asked = len(self.browser.requests())
            time.sleep(3)
            self.assertEqual(len(self.browser.requests()), asked, begin)
            self.browser.run(end)
            wait_until(lambda: len(self.browser.requests()) > asked, "it goes on")
        self.assertEqual(self.browser.faults(), [])

    @staticmethod
    def hidden(state):
        """What a page sees when its tab goes to the back, or comes to the front."""
        return (f"Object.defineProperty(document, 'hidden', {{value: {json.dumps(state)}, configurable: true}});"
                "document.dispatchEvent(new Event('visibilitychange'))")

    def test_it_fits_a_phone_and_follows_the_colours_of_the_reader(self):
        for width in (320, 390, 768, 1280):
            self.browser.size(width, 800, width < 500)
            self.show()
            wait_until(lambda: self.browser.run("document.querySelectorAll('figure').length") >= 8, "the charts are there")
            wide = self.browser.run("document.documentElement.scrollWidth")
            self.assertLessEqual(wide, width, f"nothing is wider than {width} pixels")
            if width == 390:
                self.keep("page-phone.png", 2400)
        colours = {}
        for scheme in ("light", "dark"):
            self.browser.scheme(scheme)
            style = self.browser.run("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
            colours[scheme] = [sum(map(int, value[4:-1].split(","))) for value in style]
        self.assertGreater(colours["light"][0], colours["light"][1] + 400, colours)
        self.assertLess(colours["dark"][0], colours["dark"][1] - 400, colours)

    def test_it_can_be_read_and_used_without_eyes_and_without_a_mouse(self):
        self.show()
        wait_until(lambda: self.browser.run("document.querySelectorAll('figure').length") >= 8, "the charts are there")
        nodes = self.browser.call("Accessibility.getFullAXTree")["nodes"]
        named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]}
        for role, name in (("heading", "Memory"), ("heading", "Models"), ("heading", "What happened"), ("button", "Pause"),
                           ("combobox", "Show"), ("link", "Skip to the models"), ("main", ""), ("banner", ""), ("contentinfo", "")):
            self.assertTrue(any(r == role and n.startswith(name) for r, n in named), f"{role} {name}: {sorted(named)[:40]}")
        charts = [name for role, name in named if role in ("image", "img", "graphics-document") and ", now: " in name]
        self.assertTrue(any(name.startswith("Device 0, now: in use by models") for name in charts), charts)
        self.assertGreaterEqual(len(charts), 8, charts)
        reached = []
        for _ in range(14):
            self.browser.key("Tab")
            reached.append(self.browser.run("(e => e.id || e.tagName.toLowerCase())(document.activeElement)"))
        self.assertEqual(reached[:3], ["a", "span", "pause"])
        self.assertIn("svg", reached)
        self.assertIn("summary", reached)
        # In a chart the arrows go back in time, and what is read aloud goes with them.
        wait_until(lambda: self.browser.run("samples.length") >= 4, "there is something to go back to")
        self.browser.run("document.querySelector('svg').focus()")
        self.browser.key("ArrowLeft")
        self.assertIn(", at ", self.browser.run("document.activeElement.getAttribute('aria-label')"))
        self.browser.key("Escape")
        self.assertIn(", now: ", self.browser.run("document.activeElement.getAttribute('aria-label')"))

    def test_it_says_when_nobody_answers(self):
        server = Server(MODEL, "--model-name", "costly", "--set", "model.warmup.seconds=0", "--cache", "")
        self.addCleanup(server.kill)
        self.browser.open(f"http://{server.url}/")
        state = "document.getElementById('state').textContent"
        wait_until(lambda: self.browser.run(state) == "Live", "the page is live")
        server.process.kill()
        wait_until(lambda: self.browser.run(state).startswith("No answer since"), "it says so")
        self.assertIn("The server does not answer.", self.events())


if __name__ == "__main__":
    unittest.main()
