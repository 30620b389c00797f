"""The page of a server: runs, refresh that keeps what is looked at, full resolution, the token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from argus.report.panel import Heatmap
from tests.builders import pages

from .browser import Visit, tip
from .conftest import Open
from .stub_server import StubServer

RANKS, COLUMNS, WIDTH = 64, 50, 20


def runs() -> list[dict[str, Any]]:
    common = {"ranks": RANKS, "hosts": 8, "summary": "Rank 5 is slow.", "began_ns": "1795513325000000000"}
    return [
        {"job": "llama-70b", "run": 7, "ended_ns": None, "status": "degraded", **common},
        {"job": "<b>x</b> #&", "run": 1, "ended_ns": "1795513925000000000", "status": "healthy", **common},
    ]  # fmt: skip


def live_page(summary: str) -> Any:
    made, arrays = pages.full_page(RANKS, COLUMNS, width=WIDTH)
    made.update(live=True, summary=summary)
    return made, arrays


def fine(measure: str, first: int, last: int) -> tuple[Heatmap, bytes]:
    """Single steps, in which rank 9 is late at one."""
    packing = pages.Packing()
    heat = pages.heat_map(packing, RANKS, last - first + 1)
    cells = np.full((RANKS, last - first + 1), 60, dtype=np.uint8)
    cells[9, 30 - first] = 254
    heat["edges"] = list(range(first, last + 2))
    heat["measures"] = [
        {**one, "cells": packing.add(cells, "u1")} for one in heat["measures"] if one["key"] == measure
    ]  # fmt: skip
    return heat, packing.packed()


@pytest.fixture
def server() -> Iterator[StubServer]:
    started = StubServer(token="s3cret")
    started.runs = runs()
    started.page = live_page("Rank 5 is slow.")
    started.fine = fine
    yield started
    started.close()


def opened_run(visit: Open, server: StubServer) -> Visit:
    opened = visit(origin=server.origin)
    opened.open(f"{server.origin}/#token=s3cret&job=llama-70b&run=7")
    opened.page.wait_for_function("() => document.querySelector('.link').textContent === 'live'")
    return opened


def refreshed(opened: Visit, times: int) -> None:
    opened.page.wait_for_function(
        "(times) => Number(document.querySelector('main').dataset.refreshed) >= times", arg=times
    )


def test_the_list_of_runs_leads_to_a_run_and_back(visit: Open, server: StubServer) -> None:
    opened = visit(origin=server.origin)
    page = opened.open(f"{server.origin}/#token=s3cret")
    assert "token" not in page.url
    assert server.refused == 0
    items = page.locator(".runs li")
    assert items.count() == 2
    assert "degraded" in items.nth(0).inner_text().lower()
    assert "running" in items.nth(0).inner_text()
    assert "<b>x</b> #&" in items.nth(1).inner_text()
    items.nth(0).locator("a").click()
    page.wait_for_selector("[data-panel=heatmap]")
    assert page.url.endswith("#job=llama-70b&run=7")
    page.get_by_text("◂ Runs").click()
    page.wait_for_selector(".runs li")
    page.go_back()
    page.wait_for_selector("[data-panel=heatmap]")
    # The token is kept for the tab.
    page.reload()
    page.wait_for_selector("[data-panel=heatmap]")
    assert server.refused == 0


def test_a_list_that_is_not_whole_says_so(visit: Open, server: StubServer) -> None:
    page = visit(origin=server.origin).open(f"{server.origin}/#token=s3cret")
    assert page.locator(".nothing").count() == 0
    server.left_out = 1_007
    page.reload()
    page.wait_for_selector(".runs li")
    assert page.locator(".runs .nothing").inner_text() == (
        "1,007 runs more: argus jobs lists them, and argus report shows one."
    )


def test_without_the_token_the_page_says_what_to_do(visit: Open, server: StubServer) -> None:
    opened = visit(origin=server.origin)
    page = opened.open(server.origin + "/")
    assert "open the link that argus serve printed" in page.locator(".notice").inner_text()
    assert server.asked == []
    assert len(opened.problems) == 1  # The browser's own line about 401.
    opened.problems.clear()


def test_a_link_brings_back_what_was_looked_at(visit: Open, server: StubServer) -> None:
    opened = visit(origin=server.origin)
    page = opened.open(f"{server.origin}/#token=s3cret&job=llama-70b&run=7&measure=late&steps=100-299&rank=5")
    assert page.locator("[data-part=cells]").get_attribute("data-steps") == "100-299"
    assert page.locator("[data-measure=late]").get_attribute("aria-pressed") == "true"
    assert page.locator(".chip").inner_text() == "rank 5 ✕"
    assert "s3cret" not in page.content()


def test_a_change_is_drawn_and_what_is_looked_at_stays(visit: Open, server: StubServer) -> None:
    opened = opened_run(visit, server)
    page = opened.page
    assert page.locator(".link").inner_text() == "live"
    page.locator(".verdict button.rank").click()
    page.locator("[data-panel=whatif] summary:has-text('Table')").click()
    plot = page.locator("[data-part=cells]")
    plot.focus()
    for key in ("ArrowDown", "End", "ArrowLeft", "+", "+"):
        page.keyboard.press(key)
    steps, rows = plot.get_attribute("data-steps"), plot.get_attribute("data-rows")
    assert steps != "0-999"
    assert rows != "0-63"
    page.evaluate("() => { document.querySelector('[data-panel=mesh]').kept = true; scrollTo(0, 700); }")
    at = page.evaluate("() => scrollY")
    made, arrays = pages.full_page(RANKS, COLUMNS, width=WIDTH, named=(5, 11))
    made.update(live=True, summary="Rank 11 is slow as well.")
    made["panels"][8]["table"]["rows"].append([11, 1.2, 5e7])  # type: ignore[index]
    server.page = made, arrays
    server.changed()
    refreshed(opened, 1)
    opened.drawn()
    assert "Rank 11 is slow as well." in page.locator(".verdict").inner_text()
    assert page.locator("[data-panel=whatif] tbody tr").count() == 4
    assert page.locator("[data-panel=whatif] tbody tr").last.is_visible()
    assert plot.get_attribute("data-steps") == steps
    assert plot.get_attribute("data-rows") == rows
    assert page.locator(".chip").inner_text() == "rank 5 ✕"
    assert page.locator(".verdict button.rank").get_attribute("aria-pressed") == "true"
    assert page.evaluate("() => scrollY") == at
    # What is the same was not drawn anew.
    assert page.evaluate("() => document.querySelector('[data-panel=mesh]').kept")


def test_zooming_asks_for_full_resolution(visit: Open, server: StubServer) -> None:
    opened = visit(origin=server.origin)
    page = opened.open(f"{server.origin}/#token=s3cret&job=llama-70b&run=7&steps=20-59")
    page.wait_for_selector("[data-fine='20-59']")
    assert "/api/heatmap?job=llama-70b&run=7&measure=step&first=20&last=59" in server.asked
    plot = page.locator("[data-part=cells]")
    plot.focus()
    # The first key puts the cursor on the first cell.
    for key in ("ArrowDown",) * 11 + ("ArrowRight",) * 11:
        page.keyboard.press(key)
    assert tip(page).splitlines()[:3] == ["rank 10 on node-1, GPU 2", "step 31", "Step time: 300 ms"]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert tip(page).splitlines()[:3] == ["rank 9 on node-1, GPU 1", "step 30", "Step time: 1,270 ms"]


def test_a_job_is_asked_for_by_its_name_not_by_how_the_page_shows_it(visit: Open, server: StubServer) -> None:
    server.name = "a\x1bb"
    made, arrays = live_page("Rank 5 is slow.")
    made["job"] = "a\\x1bb"
    server.page = made, arrays
    page = visit(origin=server.origin).open(f"{server.origin}/#token=s3cret&job=a%1Bb&run=7&steps=20-59")
    page.wait_for_selector("[data-fine='20-59']")
    assert "/api/heatmap?job=a%1Bb&run=7&measure=step&first=20&last=59" in server.asked


def test_a_server_that_goes_and_comes_back_is_noticed(visit: Open, server: StubServer) -> None:
    opened = opened_run(visit, server)
    page = opened.page
    server.page = live_page("This was new meanwhile.")
    server.hang_up()
    page.wait_for_function("() => document.querySelector('.link').textContent === 'not connected'")
    page.wait_for_function("() => document.querySelector('.link').textContent === 'live'")
    page.wait_for_function("() => document.querySelector('.verdict').textContent.includes('This was new meanwhile.')")


def test_a_run_that_goes_while_it_is_shown_says_so(visit: Open, server: StubServer) -> None:
    page = opened_run(visit, server).page
    server.trouble("no such run is stored")
    shown = "() => document.querySelector('.link').textContent === 'not connected: no such run is stored'"
    page.wait_for_function(shown)
    assert page.locator(".panel").count() > 0, "what was shown stays"
    server.changed()
    page.wait_for_function("() => document.querySelector('.link').textContent === 'live'")


def test_a_run_that_is_not_there(visit: Open, server: StubServer) -> None:
    opened = visit(origin=server.origin)
    page = opened.open(f"{server.origin}/#token=s3cret&job=none&run=1")
    assert page.locator(".notice").inner_text() == (
        "The server cannot show it (404): no such run is stored. The list of runs has those that are"
    )
    opened.problems.clear()  # The browser's own line about 404.
    server.page = None
    # The first answer's button stays until the second one is there: whoever waits for any button may click too early.
    page.evaluate("() => { document.querySelector('.retry button').dataset.first = 'yes'; }")
    page.evaluate("() => { location.hash = 'job=llama-70b&run=7'; }")
    page.locator(".retry button:not([data-first])").wait_for()
    server.page = live_page("Back.")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("[data-panel=heatmap]")
    opened.problems.clear()
