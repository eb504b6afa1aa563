"""A Chromium that tests and benchmarks steer as a person would: by keys, pointer and wheel, through chromedriver.

The protocol is WebDriver's, a few requests of JSON; so no package is needed beside the two programs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chrome", "chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = (
    "" if CHROMIUM and DRIVER else "no Chromium with chromedriver here (Debian: apt install chromium chromium-driver)"
)
KEYS = {
    "Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Home": "\ue011", "End": "\ue010", "PageDown": "\ue00f",
    "Left": "\ue012", "Up": "\ue013", "Right": "\ue014", "Down": "\ue015", "Control": "\ue009",
}  # fmt: skip
_OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
]  # fmt: skip


class Browser:
    """A page in a browser; see `browser`."""

    def __init__(self, address: str) -> None:
        self._address = address

    def open(self, page: Path) -> None:
        """Open a file, and wait until the page says that it is ready."""
        self.post("url", url=page.resolve().as_uri())
        for _ in range(600):
            if self.run("return document.body && document.body.dataset.ready === 'yes'"):
                return
            time.sleep(0.1)
        raise TimeoutError(f"{page} did not get ready")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page, and return what it returns."""
        return self.post("execute/sync", script=script, args=list(arguments))

    def settle(self) -> None:
        """Wait until what is to be drawn is drawn."""
        self.post("execute/async", script="requestAnimationFrame(() => requestAnimationFrame(arguments[0]))", args=[])

    def press(self, *keys: str) -> None:
        """Press keys one after the other, by their names in KEYS or as characters."""
        actions = [{"type": t, "value": KEYS.get(key, key)} for key in keys for t in ("keyDown", "keyUp")]
        self.post("actions", actions=[{"type": "key", "id": "keys", "actions": actions}])
        self.settle()

    def type(self, text: str) -> None:
        """Press the keys of a text."""
        self.press(*text)

    def click(self, x: float, y: float) -> None:
        """Click a point of the window."""
        buttons = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._point([_to(x, y), *buttons])

    def drag(self, x: float, y: float, by: float) -> None:
        """Press at a point, move to the right, and let go."""
        self._point([
            _to(x, y), {"type": "pointerDown", "button": 0}, _to(x + by / 2, y), _to(x + by, y),
            {"type": "pointerUp", "button": 0},
        ])  # fmt: skip

    def wheel(self, x: float, y: float, delta: int, *, control: bool = False) -> None:
        """Turn the wheel at a point, with the key Control held down or without."""
        scroll = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": delta, "origin": "viewport"}
        held = [{"type": t, "value": KEYS["Control"]} for t in ("keyDown", "keyUp")]
        pause: dict[str, Any] = {"type": "pause"}
        wheel = {"type": "wheel", "id": "wheel", "actions": [pause, scroll, pause]}
        keys = {"type": "key", "id": "keys", "actions": [held[0], pause, held[1]] if control else [pause]}
        self.post("actions", actions=[keys, wheel])
        time.sleep(0.3)  # a page scrolls smoothly
        self.settle()

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the window a size in pixels, and choose light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def picture(self) -> bytes:
        """Return what is seen, as a PNG."""
        self.settle()
        return base64.b64decode(self.get("screenshot"))

    def cdp(self, command: str, **parameters: Any) -> Any:
        """Send a command of the browser's own protocol."""
        return self.post("goog/cdp/execute", cmd=command, params=parameters)

    def post(self, command: str, **content: Any) -> Any:
        """Send a command of WebDriver."""
        return request(f"{self._address}/{command}", content)

    def get(self, command: str) -> Any:
        """Ask something of WebDriver."""
        return request(f"{self._address}/{command}", None)

    def _point(self, actions: list[dict[str, Any]]) -> None:
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self.post("actions", actions=[pointer])
        self.settle()


def _to(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "duration": 20, "x": round(x), "y": round(y), "origin": "viewport"}


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser; it ends with the block. Ask MISSING first whether there is one."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "driver.log"
        driver = subprocess.Popen(
            [str(DRIVER), "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        session = ""
        try:
            root = f"http://127.0.0.1:{_port(driver)}"
            options = {"binary": CHROMIUM, "args": [*_OPTIONS, f"--user-data-dir={folder}/profile"]}
            wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
            session = f"{root}/session/{request(f'{root}/session', wanted)['sessionId']}"
            yield Browser(session)
        finally:
            if session:
                request(session, None, "DELETE")
            driver.terminate()
            driver.communicate()


def _port(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port" in line:
            return line.rstrip().rstrip(".").rpartition(" ")[2]
    raise RuntimeError("chromedriver ended before it could be used")


def request(address: str, content: dict[str, Any] | None, method: str = "") -> Any:
    """Send a request of JSON, and return the value of the answer."""
    body = None if content is None else json.dumps(content).encode()
    sent = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method=method or None)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(sent, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from None
