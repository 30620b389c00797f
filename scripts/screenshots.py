"""Takes the pictures of the docs: of the page that scripts/demo has written, by the distribution's Chromium.

scripts/demo --seed 3 && .venv/bin/python scripts/screenshots.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "build" / "demo-report.html"
WIDTH = 1180
MOST_BYTES = 300_000
PICTURES = {
    "page.png": ("light", ["verdict", "heatmap"]),
    "page-dark.png": ("dark", ["kernels", "waits"]),
}
"""Files of docs/, by colours and the parts of the page that are in it."""


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None or not PAGE.exists():
        print(f"screenshots: needs Chromium (apt-get install chromium) and {PAGE} (scripts/demo)", file=sys.stderr)
        return 3
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--hide-scrollbars"])
        for name, (scheme, parts) in PICTURES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
            page.goto(PAGE.as_uri())
            page.locator(".verdict").wait_for()
            boxes = [page.locator(f"#panel-{part}, .{part}").first.bounding_box() for part in parts]
            found = [box for box in boxes if box is not None]
            top = min(box["y"] for box in found) - 8
            height = max(box["y"] + box["height"] for box in found) + 8 - top
            left = min(box["x"] for box in found) - 8
            width = max(box["width"] for box in found) + 16
            target = ROOT / "docs" / name
            clip = {"x": left, "y": top, "width": width, "height": height}
            page.screenshot(path=target, clip=clip, full_page=True)
            print(f"{target}: {target.stat().st_size / 1000:.0f} KB")
            if target.stat().st_size > MOST_BYTES:
                print(f"screenshots: {target} has more than {MOST_BYTES:,} bytes", file=sys.stderr)
                return 1
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
