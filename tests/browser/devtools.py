"""Drives a headless Chromium over the DevTools protocol, with nothing but Python's own library.

CHROMIUM names another executable than the first of `chromium`, `chromium-browser`, `google-chrome` and `chrome` on the PATH.
"""
import base64
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

PATIENCE = 60.0  # Seconds that any wait may take before the test fails.


def executable():
    """The browser's path, None where there is none."""
    names = ["chromium", "chromium-browser", "google-chrome", "chrome"]
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def wait_until(condition, what, patience=PATIENCE):
    """Return the first true value of `condition`; fail when it stays false."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"waited {patience:.0f} s in vain: {what}")


class WebSocket:
    """The client's half of RFC 6455, as much of it as DevTools needs: whole text messages."""

    def __init__(self, url):
        host, path = url.removeprefix("ws://").split("/", 1)
        name, port = host.rsplit(":", 1)
        self.socket = socket.create_connection((name, int(port)), PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall((f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                             f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode())
        self.file = self.socket.makefile("rb")
        status = self.file.readline()
        if b" 101 " not in status:
            raise OSError(f"no websocket: {status!r}")
        while self.file.readline() not in (b"\r\n", b""):
            pass

    def send(self, text):
        payload, mask = text.encode(), os.urandom(4)
        size = len(payload)
        if size < 126:
            head = struct.pack("!BB", 0x81, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 0x81, 0xFE, size)
        else:
            head = struct.pack("!BBQ", 0x81, 0xFF, size)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
        self.socket.sendall(head + mask + masked)

    def receive(self):
        """The next text message."""
        message = b""
        while True:
            first, second = self.file.read(2)
            size = second & 0x7F
            if size == 126:
                size, = struct.unpack("!H", self.file.read(2))
            elif size == 127:
                size, = struct.unpack("!Q", self.file.read(8))
            payload, kind = self.file.read(size), first & 0x0F
            if kind == 8:
                raise OSError("the browser closed the websocket")
            if kind in (0, 1):
                message += payload
                if first & 0x80:
                    return message.decode()

    def close(self):
        self.file.close()
        self.socket.close()


class Browser:
    """A Chromium with one page. Events are kept in `events`, as (method, parameters)."""

    def __init__(self, path):
        self.profile = tempfile.TemporaryDirectory(prefix="concertina-chromium-", ignore_cleanup_errors=True)
        command = [path, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self.profile.name}", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-gpu",
                   "--disable-dev-shm-usage", "--hide-scrollbars", "about:blank"]
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            told = Path(self.profile.name) / "DevToolsActivePort"
            port = wait_until(lambda: told.exists() and told.read_text().split("\n")[0], "the browser listens")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            self.socket = WebSocket(pages[0]["webSocketDebuggerUrl"])
        except BaseException:
            self.close()
            raise
        self.numbers, self.events = itertools.count(1), []
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """The result of one command; events that come meanwhile are kept."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            if "method" in message:
                self.events.append((message["method"], message["params"]))

    def run(self, expression):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, url):
        self.call("Page.navigate", url=url)
        wait_until(lambda: self.run("document.readyState") == "complete", f"{url} is loaded")

    def size(self, width, height, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def key(self, name, code=None):
        for kind in ("keyDown", "keyUp"):
            codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=code or name, windowsVirtualKeyCode=codes[name], **text)

    def screenshot(self, path, height=None):
        """The page as PNG: what is visible, or from its top down to `height`."""
        width = self.run("innerWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}} if height else {}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=bool(height), **clip)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def faults(self):
        """Exceptions, errors on the console, and violations of the content security policy."""
        self.run("0")
        bad = []
        for method, parameters in self.events:
            if method == "Runtime.exceptionThrown":
                bad.append(parameters["exceptionDetails"])
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                bad.append(parameters["args"])
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                bad.append(parameters["entry"])
        return bad

    def requests(self):
        """The addresses that the page has asked for."""
        self.run("0")
        return [parameters["request"]["url"] for method, parameters in self.events if method == "Network.requestWillBeSent"]

    def close(self):
        if hasattr(self, "socket"):
            self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.profile.cleanup()
