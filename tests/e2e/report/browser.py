"""Pages in headless Chromium: what they ask for, what they complain about, and pictures of them.

The browser is the distribution's (``ARGUS_WITH_BROWSER=1 scripts/setup`` installs it), driven by Playwright, which
brings none here.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, ConsoleMessage, Page, Route

CHROMIUM = shutil.which("chromium") or ""
ARGUMENTS = ["--no-sandbox", "--disable-background-networking", "--font-render-hinting=none", "--hide-scrollbars"]
WAIT_MS = 60_000
"""For what comes at once on an idle machine."""


def missing() -> str:
    """Why tests of the page are skipped; empty: they run. Where a browser was asked for, its lack is a failure."""
    if os.environ.get("ARGUS_WITH_BROWSER") == "1":
        return ""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "no Playwright here: run scripts/setup again"
    return "" if CHROMIUM else "no Chromium here: ARGUS_WITH_BROWSER=1 scripts/setup"


class Visit:
    """A page that is open, in a browser without a network."""

    def __init__(self, browser: Browser, *, width: int = 1280, height: int = 900, scheme: str = "light",
                 script: bool = True, origin: str = "") -> None:  # fmt: skip
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, java_script_enabled=script,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )  # fmt: skip
        self.context.set_default_timeout(WAIT_MS)
        self.requests: list[str] = []
        """That would leave the page."""
        self.problems: list[str] = []
        """Errors and warnings."""
        # What is allowed does not come by: the thread that answers here may be waiting for the server.
        allowed = ["file:", "data:", "blob:", *([f"{re.escape(origin)}/"] if origin else [])]
        self.context.route(re.compile(f"^(?!{'|'.join(allowed)})"), self._refuse)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))

    def _refuse(self, route: Route) -> None:
        self.requests.append(route.request.url)
        route.abort()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.problems.append(f"{message.type}: {message.text}")

    def open(self, address: str | Path) -> Page:
        """Opens it, and waits until it is drawn."""
        self.page.goto(address.as_uri() if isinstance(address, Path) else address)
        self.page.wait_for_selector("html[data-ready]")
        self.drawn()
        return self.page

    def drawn(self) -> None:
        """Waits for what is drawn before the next two pictures."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
        )

    def devtools(self) -> CDPSession:
        return self.context.new_cdp_session(self.page)

    def close(self) -> None:
        self.context.close()


def cell(
    page: Page, rank: int, step: float, *, ranks: int = 8, steps: int = 100, pinned: int = 1
) -> tuple[float, float]:
    """Where a cell of a small heat map with titles and labels is drawn, in the window."""
    plot = page.locator("[data-part=cells]")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    top = 18 + (pinned * 16 + 10 if pinned else 0) + 15
    each = (box["height"] - top - 22) / ranks
    return box["x"] + 112 + (step + 0.5) / steps * (box["width"] - 113), box["y"] + top + (rank + 0.5) * each


def tip(page: Page) -> str:
    """What is shown beside the pointer."""
    page.wait_for_selector(".tip:not([hidden])")
    return page.locator(".tip").inner_text()


_SMALL = """async ([png, width, height]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height || Math.round(image.height * width / image.width)];
  const c = canvas.getContext("2d");
  c.imageSmoothingQuality = "high";
  c.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png").split(",")[1];
}"""
_DIFFERENCE = """async ([one, other]) => {
  const pixels = await Promise.all([one, other].map(async (png) => {
    const image = new Image();
    image.src = `data:image/png;base64,${png}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    const c = canvas.getContext("2d");
    c.drawImage(image, 0, 0);
    return c.getImageData(0, 0, image.width, image.height).data;
  }));
  if (pixels[0].length !== pixels[1].length) return 255;
  return pixels[0].reduce((sum, value, i) => sum + Math.abs(value - pixels[1][i]), 0) / pixels[0].length;
}"""


def small_picture(page: Page, png: bytes, width: int, height: int = 0) -> bytes:
    """A picture at a size at which letters are grey."""
    text = base64.b64encode(png).decode()
    return base64.b64decode(page.evaluate(_SMALL, [text, width, height]))


def difference(page: Page, one: bytes, other: bytes) -> float:
    """How far two pictures are apart: the mean of all channels, 0 to 255."""
    return float(page.evaluate(_DIFFERENCE, [base64.b64encode(each).decode() for each in (one, other)]))
