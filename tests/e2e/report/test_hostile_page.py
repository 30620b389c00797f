"""Pages with texts that would do harm, and files that are damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from argus.report import page as report_page
from tests.builders import pages

from .conftest import Open, Write


@pytest.mark.parametrize("begin", [0, 5])
def test_hostile_texts_are_only_texts(visit: Open, write: Write, begin: int) -> None:
    texts = pages.HOSTILE[:-1]
    path = write(pages.hostile_page(texts, begin))
    source = path.read_text(encoding="utf-8")
    # Nothing ends an element before its time, whatever reads the file.
    assert len(re.findall(r"<script", source, re.IGNORECASE)) == 3
    assert len(re.findall(r"</script", source, re.IGNORECASE)) == 3
    opened = visit()
    page = opened.open(path)
    assert page.locator(".panel").count() == 10
    assert page.locator(".damaged").count() == 0
    assert (
        page.locator("body script:not([type])").count()
        == page.locator("img, iframe, object, a[href^=javascript]").count()
        == 0
    )
    assert "owned" not in (page.title().split("'owned'")[0])
    text = page.locator("body").inner_text()
    assert "<img src=x onerror=" in text
    assert "\\u202eelif" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", text)
    assert page.evaluate("() => [Object.keys(Object.prototype).length, typeof {}.rank]") == [0, "undefined"]
    # Hover and selection too.
    for plot in page.locator(".plot").all():
        plot.hover(position={"x": 150, "y": 60})
        plot.focus()
        page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 1280


def test_a_text_of_a_megabyte_does_not_stop_the_page(visit: Open, write: Write) -> None:
    page = visit(width=320).open(write(pages.hostile_page((pages.HOSTILE[-1],))))
    assert page.locator(".panel").count() == 10
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 320


def test_nothing_but_the_pages_own_program_runs(visit: Open, full: Path) -> None:
    """The policy holds even where markup got into the page."""
    opened = visit()
    page = opened.open(full)
    page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "document.title = 'owned'";
      document.body.append(script);
      const image = new Image();
      image.src = "https://example.com/x.png";
      document.body.append(image);
    }""")
    opened.drawn()
    assert page.title() != "owned"
    assert opened.requests == []
    assert any("Content Security Policy" in problem for problem in opened.problems)
    assert len(opened.problems) >= 2
    opened.problems.clear()


@pytest.mark.parametrize("part", ["cut", "wrong", "empty"])
def test_damaged_arrays_leave_the_verdict_and_one_clear_line(
    visit: Open, full: Path, tmp_path: Path, part: str
) -> None:
    source = full.read_text(encoding="utf-8")
    head, arrays = source.split('id="argus-arrays">')
    packed, tail = arrays.split("</script>", 1)
    changed = {"cut": packed[: len(packed) // 2], "wrong": packed[:400] + "%%%" + packed[403:], "empty": ""}[part]
    path = tmp_path / "page.html"
    path.write_text(f'{head}id="argus-arrays">{changed}</script>{tail}', encoding="utf-8")
    page = visit().open(path)
    assert "DEGRADED" in page.locator(".verdict").inner_text()
    # Five panels draw numbers of arrays, the others are whole.
    assert page.locator(".damaged").count() == 4
    assert page.locator(".view-bars .bars li").count() == 3
    if part != "empty":
        assert page.locator(".notice").inner_text() == (
            "Pictures are missing: the file's numbers are cut off or damaged. Make the page anew with argus report."
        )


def test_a_file_that_is_cut_off_anywhere_says_so(visit: Open, full: Path, tmp_path: Path) -> None:
    source = full.read_bytes()
    begin = source.index(b'id="argus-page">')
    between = source.index(b'id="argus-arrays">')
    opened = visit()
    for size, words in (
        (begin + 4000, "cut off or damaged: its data cannot be read"),
        (begin - 60, "cut off or damaged: its data cannot be read"),
        (between - 26, "Pictures are missing"),
        (between + 5000, "Pictures are missing"),
    ):
        path = tmp_path / f"cut-{size}.html"
        path.write_bytes(source[:size])
        page = opened.open(path)
        assert words in page.locator(".notice").inner_text(), size


def test_a_page_of_another_version_or_of_nothing_is_refused(visit: Open, write: Write) -> None:
    made, arrays = pages.absent_page()
    opened = visit()
    for schema, words in (("argus.page/9", "another version of Argus (argus.page/9)"), ("x", "no page of Argus")):
        page = opened.open(write(({**made, "schema": schema}, arrays)))  # type: ignore[typeddict-item]
        assert words in page.locator(".notice").inner_text()


def test_an_unknown_view_and_a_reference_that_does_not_fit_are_one_line_each(visit: Open, write: Write) -> None:
    made, arrays = pages.full_page()
    made["panels"][1]["views"][0]["cells"]["offset"] = 1 << 40  # type: ignore[typeddict-item,index]
    made["panels"][2]["views"][0]["view"] = "hologram"  # type: ignore[typeddict-item,index]
    made["panels"][6]["views"][0]["frames"] = None  # type: ignore[typeddict-item,index]
    made["panels"][0]["views"][0]["edges"].pop()  # type: ignore[typeddict-item,index]
    page = visit().open(write((made, arrays)))
    assert page.locator(".panel").count() == 10
    assert page.locator(".nothing").count() == 4
    assert 'no view "hologram"' in page.locator("[data-panel=steps]").inner_text()
    assert "do not fit" in page.locator("[data-panel=heatmap]").inner_text()


def test_the_file_has_numbers_that_json_lacks_as_null() -> None:
    made, arrays = pages.absent_page()
    made["verdict"]["slowdown"] = float("nan")
    content = b"".join(report_page.html(made, arrays)).decode()
    text = content.split('id="argus-page">')[1].split("</script>")[0]
    assert json.loads(text)["verdict"]["slowdown"] is None
