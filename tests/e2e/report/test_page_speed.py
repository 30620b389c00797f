"""How long the largest page keeps a browser busy: 10,240 ranks, 256 columns, five measures.

Bounds are on the time that the page's thread works, which a busy machine does not stretch; the time that passed is
printed (``pytest -s``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.builders import pages

from .browser import Visit
from .conftest import Open, Write

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession

RANKS, COLUMNS = 10_240, 256
FIRST_PAINT_S, ACTION_MS = 3.0, 200.0


@pytest.fixture(scope="module")
def large(write: Write) -> Path:
    return write(pages.full_page(RANKS, COLUMNS, width=4, named=(5, 6001)))


def worked_s(devtools: CDPSession) -> float:
    """What the page's thread has worked since it began."""
    metrics = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


class Measured:
    """Figures of an action: medians of a few."""

    def __init__(self, opened: Visit, devtools: CDPSession) -> None:
        self.opened, self.devtools = opened, devtools
        self.figures: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """From before an action until two pictures later."""
        self.opened.drawn()
        worked, began = worked_s(self.devtools), self.opened.page.evaluate("() => performance.now()")
        yield
        self.opened.drawn()
        passed = self.opened.page.evaluate("() => performance.now()") - began
        self.figures.setdefault(name, []).append(((worked_s(self.devtools) - worked) * 1e3, passed))

    def medians(self) -> dict[str, tuple[float, float]]:
        return {name: sorted(all_)[len(all_) // 2] for name, all_ in self.figures.items()}


def test_the_largest_page_is_painted_and_moved_in_time(visit: Open, large: Path) -> None:
    opened = visit()
    devtools = opened.devtools()
    # Time that the thread had a processor.
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page = opened.open(large)
    painted_s = worked_s(devtools)
    wall_ms = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
    plot = page.locator("[data-part=cells]")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + 250
    measured = Measured(opened, devtools)
    for offset in range(5):
        with measured.action("hover"):
            page.mouse.move(x + offset * 20, y + offset * 9)
    for measure in ("late", "compute", "exposed", "utilization", "step"):
        with measured.action("measure"):
            page.locator(f"[data-measure={measure}]").click()
    plot.focus()
    page.mouse.move(x, y)
    for delta in (-100, -100, -100, 100, 100):
        before = plot.get_attribute("data-steps")
        with measured.action("zoom"):
            page.mouse.wheel(0, delta)
            page.wait_for_function(
                "(before) => document.querySelector('[data-part=cells]').dataset.steps !== before",
                arg=before,
            )
    for _ in range(3):
        page.keyboard.press("Escape")
        with measured.action("brush"):
            page.mouse.move(x - 200, y - 60)
            page.mouse.down()
            page.mouse.move(x, y, steps=4)
            page.mouse.up()
        page.mouse.move(x, y)
    for rank in (5, 6001, 77):
        with measured.action("select"):
            page.evaluate("(rank) => { location.hash = `rank=${rank}`; }", rank)
    figures = measured.medians()
    size_mb = large.stat().st_size / 1e6
    print(f"\nfile {size_mb:.1f} MB; until drawn {painted_s:.2f} s worked; first paint after {wall_ms:.0f} ms")
    for name, (worked, passed) in figures.items():
        print(f"{name}: {worked:.0f} ms worked, {passed:.0f} ms passed")
    assert painted_s < FIRST_PAINT_S
    assert {name: worked for name, (worked, _) in figures.items() if worked > ACTION_MS} == {}
