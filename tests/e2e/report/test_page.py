"""The page as a file, in a real browser: what is there, and what happens when it is used."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import pages

from .browser import cell, tip
from .conftest import Open, Write

PANELS = ["heatmap", "mesh", "steps", "phases", "kernels", "links", "stacks", "path", "whatif", "environment"]
VIEWS = ["heatmap", "grid", "series", "stacked", "densities", "graph", "flame", "timeline", "bars", "facts"]
COLORS = """([selector, number]) => {
  const from = document.querySelectorAll(selector)[number], canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [from.width, from.height];
  const c = canvas.getContext("2d", { willReadFrequently: true }), found = {};
  c.drawImage(from, 0, 0);
  const { data } = c.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    if (!data[i + 3]) continue;
    const color = data[i] << 16 | data[i + 1] << 8 | data[i + 2];
    (found[color] ??= []).push([i / 4 % canvas.width, Math.floor(i / 4 / canvas.width)]);
  }
  return Object.entries(found).map(([color, places]) => [Number(color), places.slice(0, 50)]);
}"""
"""The colours of a canvas, and where they are."""
YELLOW = 0xFEE838
"""Of the highest value in cividis."""
CELLS = "[data-part=cells] canvas"
MARKED = "[data-part=cells] canvas.over"


def colors_of(page: Any, selector: str, number: int = 0) -> dict[int, list[list[int]]]:
    return dict(page.evaluate(COLORS, [selector, number]))


def test_every_panel_is_there_in_order_and_the_absent_ones_at_the_end(visit: Open, full: Path) -> None:
    page = visit().open(full)
    assert page.title() == "llama-70b run 7: degraded · Argus"
    assert page.eval_on_selector_all(".panel", "all => all.map(one => one.dataset.panel)") == PANELS
    for view in VIEWS:
        assert page.locator(f".view-{view}").count() >= 1, view
    assert page.locator(".nothing").count() == 0
    pictures = ".plot > canvas:not(.over), .uplot canvas"
    assert page.locator(pictures).count() == 8
    for number in range(8):
        assert len(colors_of(page, pictures, number)) > 5, number
    assert page.locator(".absent dd").all_inner_texts() == ["No earlier run of this job is stored."]
    assert "✗ bad GPU 5 of node-0" in " ".join(str(page.locator(".facts").text_content()).split())
    # Each panel has its query, each table a caption, which says what is left out, and heads.
    assert page.locator(".panel summary:has-text('SQL behind it')").count() == len(PANELS)
    assert page.locator("table caption").count() == page.locator("table").count() == 2
    whole, cut = page.locator("table caption").all_text_contents()
    assert ":" not in whole
    assert cut.endswith(": 3 of 1,024 rows")
    assert page.locator("thead th[scope=col]").count() == 6


def test_the_verdict_comes_first_and_says_all_in_words(visit: Open, full: Path) -> None:
    page = visit().open(full)
    assert page.evaluate("() => document.querySelector('main section').className") == "verdict"
    text = page.locator(".verdict").inner_text()
    for words in (
        "DEGRADED", "Rank 5 on node-0 computes 1.84x slower", "compute straggler", "rank 5", "on node-0", "step 40",
        "1.84x", "31 % of the lost time", "93 %", "infrastructure", "Drain node-0", "arrives last in 58 of 60 steps",
        "Coverage: complete",
    ):  # fmt: skip
        assert words in text, words
    assert page.locator(".verdict pre").count() == 2
    assert not page.locator(".verdict pre").first.is_visible()
    page.locator(".verdict summary").first.click()
    assert page.locator(".verdict pre").first.inner_text() == "SELECT 1"


def test_hover_says_rank_host_step_and_value(visit: Open, full: Path) -> None:
    page = visit().open(full)
    made, arrays = pages.full_page()
    measure = made["panels"][0]["views"][0]["measures"][0]  # type: ignore[typeddict-item]
    cells = np.frombuffer(zlib.decompress(arrays), np.uint8, 800, measure["cells"]["offset"]).reshape(8, 100)
    for rank, step in ((0, 0), (3, 57), (7, 99)):
        page.mouse.move(*cell(page, rank, step))
        lines = tip(page).splitlines()
        assert lines[:2] == [f"rank {rank} on node-0, GPU {rank}", f"step {step}"]
        assert lines[2] == f"Step time: {cells[rank, step] / 254 * 1270:.0f} ms"
    page.mouse.move(*cell(page, 5, 40))
    assert "Step time: 1,150 ms" in tip(page)
    assert "change: compute straggler begins" in tip(page)
    page.mouse.move(5, 5)
    page.wait_for_selector(".tip", state="hidden")


def test_dragging_zooms_all_views_and_stays_in_the_address(visit: Open, full: Path) -> None:
    opened = visit()
    page = opened.open(full)
    plot = page.locator("[data-part=cells]")
    page.mouse.move(*cell(page, 2, 20))
    page.mouse.down()
    page.mouse.move(*cell(page, 4, 30))
    page.mouse.move(*cell(page, 5, 39))
    page.mouse.up()
    assert plot.get_attribute("data-steps") == "20-39"
    assert plot.get_attribute("data-rows") == "2-5"
    assert page.locator(".plot.lines").get_attribute("data-shown") == "20-39"
    assert page.url.endswith("#steps=20-39")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("[data-steps='20-39']")
    plot.dblclick(position={"x": 400, "y": 150})
    assert plot.get_attribute("data-steps") == "0-99"
    assert "#" not in page.url or page.url.endswith("#")
    # And the other way around: dragging over the lines.
    lines = page.locator(".u-over")
    lines.scroll_into_view_if_needed()
    box = lines.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30)
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 30)
    page.mouse.up()
    page.wait_for_selector("[data-part=cells][data-steps='50-74']")


def test_the_wheel_scrolls_the_page_until_the_map_is_clicked(visit: Open, full: Path) -> None:
    opened = visit()
    page = opened.open(full)
    plot = page.locator("[data-part=cells]")
    x, y = cell(page, 3, 50)
    page.mouse.move(x, y)
    page.mouse.wheel(0, 60)
    page.wait_for_function("() => scrollY > 0")
    assert plot.get_attribute("data-steps") == "0-99"
    x, y = cell(page, 3, 50)
    page.mouse.click(x, y)
    at = page.evaluate("() => scrollY")
    page.mouse.wheel(0, -100)
    page.wait_for_function("() => document.querySelector('[data-part=cells]').dataset.steps !== '0-99'")
    first, last = map(int, str(plot.get_attribute("data-steps")).split("-"))
    assert first < 50 < last
    assert last - first == 66
    assert page.evaluate("() => scrollY") == at


def test_keys_move_a_cell_and_select_its_rank(visit: Open, full: Path) -> None:
    opened = visit()
    page = opened.open(full)
    plot = page.locator("[data-part=cells]")
    plot.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "Shift+ArrowRight"):
        page.keyboard.press(key)
    assert plot.locator("[aria-live]").inner_text().startswith("rank 2 on node-0, GPU 2, step 11, Step time: ")
    page.keyboard.press("Enter")
    assert page.locator(".chip").inner_text() == "rank 2 ✕"
    page.keyboard.press("End")
    assert "step 99" in plot.locator("[aria-live]").inner_text()
    page.keyboard.press("+")
    assert plot.get_attribute("data-steps") != "0-99"
    page.keyboard.press("Escape")
    assert plot.get_attribute("data-steps") == "0-99"
    # Every other picture too: the first thing in it, then the next.
    for name, first in (
        ("grid", "stage stage 0, data-parallel rank 0"),
        ("flame", "all"),
        ("timeline", "compute 0"),
        ("graph", "rank"),
    ):
        other = page.locator(f".view-{name} .plot").first
        other.focus()
        page.keyboard.press("Home")
        assert first in other.locator("[aria-live]").inner_text(), name


def test_a_rank_that_is_selected_is_marked_everywhere(visit: Open, full: Path) -> None:
    opened = visit()
    page = opened.open(full)
    assert colors_of(page, MARKED) == {}
    assert "null" not in str(page.locator("body > :not(script)").evaluate_all("all => all.map(one => one.outerHTML)"))
    page.locator(".verdict button.rank").click()
    opened.drawn()
    assert page.url.endswith("#rank=5")
    assert len(colors_of(page, MARKED)) >= 2
    assert len(colors_of(page, ".view-grid canvas.over")) >= 2
    for place in (".verdict", ".view-stacked", ".view-bars", ".view-series", ".view-densities"):
        assert page.locator(f"{place} button.rank[aria-pressed=true]").count() == 1, place
    assert page.locator("tr.selected").count() == 2
    page.locator(".chip").click()
    opened.drawn()
    assert colors_of(page, MARKED) == {}
    assert page.locator("[aria-pressed=true].rank").count() == 0
    # From the mesh.
    grid = page.locator(".view-grid .plot")
    grid.focus()
    for key in ("Home", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.locator(".chip").inner_text() == "rank 9 ✕"


def test_measures_are_switched_and_low_values_are_bright_where_they_are_bad(visit: Open, full: Path) -> None:
    opened = visit()
    page = opened.open(full)
    before = colors_of(page, CELLS)
    page.locator("[data-measure=utilization]").click()
    assert page.locator("[data-measure=utilization]").get_attribute("aria-pressed") == "true"
    assert page.url.endswith("#measure=utilization")
    assert page.locator(".scale").inner_text().split() == ["0", "%", "100", "%", "not", "known"]
    page.mouse.move(*cell(page, 5, 60))
    assert "GPU busy: 9.4 %" in tip(page)
    # Its cells are those of the step time upside down, and so are its colours: the straggler is as bright.
    assert set(colors_of(page, CELLS)) >= {color for color in before if color >> 16 > 220 and color & 255 < 90}


@pytest.mark.parametrize("high_is_bad", [True, False])
def test_one_cell_among_ten_million_is_seen_and_found(visit: Open, write: Write, high_is_bad: bool) -> None:
    rank, step = 7777, 333
    opened = visit()
    page = opened.open(write(pages.one_cell(10_240, 1000, rank, step, high_is_bad=high_is_bad)))
    found = colors_of(page, CELLS)[YELLOW]
    assert 4 <= len(found) <= 16
    box = page.locator("[data-part=cells]").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + found[0][0] + 0.5, box["y"] + found[0][1] + 0.5)
    lines = tip(page).splitlines()
    assert lines[:2] == [f"rank {rank} on node-{rank // 8}, GPU {rank % 8}", f"step {step}"]
    assert ("highest of" if high_is_bad else "lowest of") in lines[-1]


def test_dark_is_the_systems_choice_or_the_readers(visit: Open, full: Path) -> None:
    opened = visit(scheme="dark")
    page = opened.open(full)
    background = "() => getComputedStyle(document.body).backgroundColor"
    dark, drawn = page.evaluate(background), set(colors_of(page, ".view-grid canvas"))
    page.get_by_role("button", name="Colours").click()
    opened.drawn()
    light = page.evaluate(background)
    assert page.get_by_role("button", name="Colours").inner_text() == "Colours: light"
    assert sum(map(int, dark[4:-1].split(","))) < 150 < 600 < sum(map(int, light[4:-1].split(",")))
    assert drawn != set(colors_of(page, ".view-grid canvas"))
    page.emulate_media(color_scheme="light")
    page.get_by_role("button", name="Colours").click()
    assert page.evaluate(background) == dark


def test_bars_of_noise_are_short(visit: Open, write: Write) -> None:
    """Of a job without anything slow: 0.9962 to 1.006 times are no differences."""
    worth: list[tuple[str, float]] = [("the whole job", 0.9962), ("stage 2", 1.006), ("rank 9", 1.002)]
    bars: Any = {
        "view": "bars", "unit": "ratio", "origin": 1.0, "least": 0.1,
        "bars": [{"title": title, "value": value, "detail": "", "named": False} for title, value in worth],
    }  # fmt: skip
    page = visit().open(write((pages.page([pages.panel("whatif", bars)]), pages.Packing().packed())))
    widths = "all => all.map(one => one.offsetWidth / one.parentElement.offsetWidth)"
    shares = page.eval_on_selector_all(".bars .fill", widths)
    assert [round(share, 2) for share in shares] == [0.04, 0.06, 0.02]


@pytest.mark.parametrize("width", [320, 1280, 3840])
def test_no_width_scrolls_the_page_sideways(visit: Open, full: Path, width: int) -> None:
    page = visit(width=width).open(full)
    page.evaluate("() => document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    outside = """(width) => [...document.querySelectorAll("#argus *")].filter(one => {
      const box = one.getBoundingClientRect();
      const outside = box.right > width + 1 || box.left < -1;
      return box.width && outside && !one.closest(".hidden, .skip, .scroll, pre, .uplot, canvas");
    }).map(one => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside, width) == []


def test_a_scale_with_all_it_may_have_fits_a_narrow_window(visit: Open, write: Write) -> None:
    packing = pages.Packing()
    heat = pages.heat_map(packing, 8, 20)
    unknown = packing.add(np.full((8, 20), 255), "u1")
    heat["measures"] = [{**heat["measures"][0], "low": 285e6, "high": 582e6, "cells": unknown}]
    page = visit(width=320).open(write((pages.page([pages.panel("heatmap", heat)]), packing.packed())))
    assert page.locator(".scale").inner_text().split("\n")[-1] == "not known"
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 320


def test_print_is_light_with_tables_open_and_nothing_of_the_screen(visit: Open, full: Path) -> None:
    opened = visit(scheme="dark")
    page = opened.open(full)
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("() => !document.documentElement.hasAttribute('data-dark')")
    assert page.locator("table:visible").count() == 2
    assert page.locator("pre:visible").count() == 0
    assert page.locator(".theme:visible, nav:visible, .hint:visible").count() == 0
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 1280
    page.emulate_media(media="screen", color_scheme="dark")
    page.wait_for_function("() => document.documentElement.hasAttribute('data-dark')")
    assert page.locator("table:visible").count() == 0


def test_everything_that_can_be_used_has_a_name_and_a_focus_that_shows(visit: Open, full: Path) -> None:
    page = visit().open(full)
    nameless = """() => [...document.querySelectorAll("button, a, input, summary, [tabindex='0']")]
      .filter(one => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length))
      .map(one => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(nameless) == []
    assert page.evaluate("() => document.documentElement.lang") == "en"
    ids = page.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))
    seen = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("() => document.activeElement.className || document.activeElement.tagName"))
        style = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"
    assert {"skip", "theme", "plot", "rank", "SUMMARY"} <= seen


def test_flames_zoom_and_are_searched(visit: Open, full: Path) -> None:
    opened = visit()
    page = opened.open(full)
    flame = page.locator(".flame").first
    flame.scroll_into_view_if_needed()
    plot = flame.locator(".plot")
    back = flame.get_by_role("button", name="Show all")
    assert not back.is_visible()
    plot.click(position={"x": 30, "y": 45})
    assert back.is_visible()
    # What is zoomed to is as wide as the picture.
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 45)
    assert "futex_wait 2.0" in tip(page)
    plot.focus()
    page.keyboard.press("Escape")
    assert not back.is_visible()
    flame.locator("input").fill("FUTEX")
    count = sum("futex" in frame["name"] for frame in pages.frames())
    assert flame.locator(".found").inner_text() == f"{count} frames"


def test_a_run_without_anything_a_single_step_and_absent_panels(visit: Open, write: Write) -> None:
    page = visit().open(write(pages.empty_page()))
    assert page.locator(".nothing").count() == 10
    assert page.locator(".damaged").count() == 0
    assert "INCONCLUSIVE" in page.locator(".verdict").inner_text()
    assert "no steps" in page.locator("footer").inner_text()

    page = visit().open(write(pages.small_page()))
    assert page.locator(".panel").count() == 10
    assert page.locator(".damaged").count() == 0
    assert page.locator("[data-part=cells]").get_attribute("data-steps") == "5-5"
    page.locator("[data-measure=none]").click()
    box = page.locator("[data-part=cells]").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 300, box["y"] + 40)
    assert "None: – (not known)" in tip(page)

    page = visit().open(write(pages.absent_page()))
    assert page.locator(".panel").count() == 0
    assert page.locator(".absent dt").count() == 4
    assert "HEALTHY" in page.locator(".verdict").inner_text()


def test_the_verdict_as_text_gives_way_to_the_page(visit: Open, full: Path) -> None:
    assert '<div class="first"><h1>' in full.read_text(encoding="utf-8")
    opened = visit().open(full)
    assert opened.locator(".first").count() == 0
    assert opened.locator(".verdict").count() == 1


def test_without_script_the_verdict_is_there_as_text(visit: Open, full: Path) -> None:
    opened = visit(script=False)
    opened.page.goto(full.as_uri())
    text = opened.page.locator("body").inner_text()
    assert "degraded" in text
    assert "Rank 5 on node-0 computes 1.84x slower" in text
    assert "Drain node-0" in text
