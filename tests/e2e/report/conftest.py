"""A browser for all tests of the page, and a window for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from argus.report import page as report_page
from argus.report.panel import Page

from .browser import ARGUMENTS, CHROMIUM, Visit, missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Write = Callable[[tuple[Page, bytes]], Path]
Open = Callable[..., Visit]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and missing():
            item.add_marker(pytest.mark.skip(reason=missing()))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    if not CHROMIUM:
        pytest.fail("there is no Chromium, though ARGUS_WITH_BROWSER=1: run scripts/setup")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=120_000)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens windows. None may have complained, or asked for anything outside."""
    opened: list[Visit] = []

    def new(**options: Any) -> Visit:
        opened.append(Visit(browser, **options))
        return opened[-1]

    yield new
    requests = [request for each in opened for request in each.requests]
    problems = [problem for each in opened for problem in each.problems]
    for each in opened:
        each.close()
    assert requests == []
    assert problems == []


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a page as a file."""
    folder = tmp_path_factory.mktemp("pages")
    count = 0

    def as_file(made: tuple[Page, bytes]) -> Path:
        nonlocal count
        count += 1
        path = folder / f"page-{count}.html"
        with path.open("wb") as file:
            file.writelines(report_page.html(*made))
        return path

    return as_file


@pytest.fixture(scope="session")
def full(write: Write) -> Path:
    """Every view once, 8 ranks by 100 steps."""
    from tests.builders.pages import full_page

    return write(full_page())
