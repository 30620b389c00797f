"""What pages look like, against pictures in ``pictures/``.

Fonts differ between machines, and so does where a line breaks. So pictures are compared at a size at which letters are
a shade: of each drawing 160 pixels, of the page's head 128, scaled to one height. ``ARGUS_NEW_PICTURES=1`` writes them
anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .browser import difference, small_picture
from .conftest import Open

PICTURES = Path(__file__).parent / "pictures"
PARTS = {
    "page": "", "heatmap": "[data-part=cells]", "mesh": ".view-grid .plot", "steps": ".plot.lines",
    "kernels": ".view-densities .plot", "stacks": ".flame:last-of-type .plot", "ring": ".view-graph .plot",
    "phases": ".view-stacked .bars",
}  # fmt: skip
MOST = 7.0
"""Of 255, as a mean. Other fonts give up to 3, dark for light 100 and more, another measure of the heat map 20."""


def taken(opened: object, part: str) -> bytes:
    page = opened.page  # type: ignore[attr-defined]
    if part == "page":
        return small_picture(page, page.screenshot(), 128, 90)
    return small_picture(page, page.locator(PARTS[part]).last.screenshot(), 160, 60)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_look_as_they_did(visit: Open, full: Path, scheme: str) -> None:
    opened = visit(scheme=scheme)
    opened.open(full)
    apart = {}
    for part in PARTS:
        path = PICTURES / f"{part}-{scheme}.png"
        now = taken(opened, part)
        if os.environ.get("ARGUS_NEW_PICTURES") == "1":
            path.write_bytes(now)
        apart[part] = difference(opened.page, now, path.read_bytes())
    print({part: round(value, 2) for part, value in apart.items()})
    assert {part: value for part, value in apart.items() if value > MOST} == {}


def test_another_picture_is_not_the_same(visit: Open, full: Path) -> None:
    """What the tolerance still tells apart."""
    opened = visit()
    page = opened.open(full)
    before = taken(opened, "heatmap")
    page.locator("[data-part=cells]").focus()
    for key in ("ArrowDown", "+", "+"):
        page.keyboard.press(key)
    page.keyboard.press("Tab")
    page.mouse.move(2, 2)
    opened.drawn()
    assert difference(page, taken(opened, "heatmap"), before) > MOST
    page.emulate_media(color_scheme="dark")
    opened.drawn()
    assert difference(page, taken(opened, "mesh"), (PICTURES / "mesh-light.png").read_bytes()) > 50
