"""A page of ``argus serve`` beside a trace: real processes, a real store, a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from run import Job

from tests.e2e.conftest import Log, attached, pid_words, start_trace
from tests.e2e.serving import Server
from tests.kernel.conftest import wait_for_cuda

from .conftest import Open

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.kernel

RANKS, SLOW = 2, 1
ENOUGH = 320
"""Steps, so that some of them share a column of the heat map (256)."""
SHORT = ["--forward-us", "6000", "--backward-us", "10000"]
"""Steps of half the length that they have by themselves."""
QUICK = """
from argus.cli.main import main
from argus.report.server import answers, app
app.make_app.__kwdefaults__["look_s"], answers.REST = 0.5, 0.5
main()
"""
"""The verb, which looks for new steps, and makes pages anew, more often than it does where a job trains."""
FOLLOWED_MS = 60_000
"""In which new steps come, and a finding: some seconds on an idle machine."""

FINE = """() => {
  const { fine, steps } = document.querySelector("[data-part=cells]").dataset;
  if (!/^\\d+-\\d+$/.test(fine ?? "")) return false;
  const [from, to] = fine.split("-").map(Number), [first, last] = steps.split("-").map(Number);
  return from <= first && last <= to;
}"""
COVERS = """(step) => {
  const found = /steps [\\d,]+ to ([\\d,]+)/.exec(document.querySelector("footer").textContent);
  return found && Number(found[1].replaceAll(",", "")) >= step;
}"""
"""Whether the page says that it covers a step."""


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """What is wrong with the job, from the next step on."""
    file = tmp_path / "faults"
    file.write_text("")
    return file


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path, RANKS)


@pytest.fixture
def serving(store_url: str, control: Path, log: Log) -> Iterator[Server]:
    """A server, over the store of a trace that goes on."""
    env = {"FAKEGPU_CONTROL": str(control)}
    with Job(ranks=RANKS, args=["--steps", "0", *SHORT, *log.args], env=env, cupti=True) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids), "--duration", "300")
        try:
            attached(tracing)
            log.wait_for_steps(ENOUGH)
            server = Server(store_url, program=QUICK)
            yield server
            server.end()
        finally:
            tracing.kill()
            tracing.communicate()


def last_step(page: Page) -> int:
    """Of those that the page says that it covers."""
    found = re.search(r"steps [\d,]+ to ([\d,]+)", page.locator("footer").inner_text())
    return int(found[1].replace(",", "")) if found else -1


def test_a_page_follows_a_run_from_the_list_to_the_finding(
    visit: Open, serving: Server, control: Path, log: Log
) -> None:
    origin = f"http://127.0.0.1:{serving.port}"
    opened = visit(origin=origin)
    asked: list[str] = []
    opened.page.on("request", lambda request: asked.append(request.url))
    page = opened.open(f"{origin}/#token={serving.token}")
    entry = page.locator(".runs li")
    assert entry.count() == 1
    assert "running" in entry.inner_text()
    entry.locator("a").click()
    page.wait_for_selector("[data-panel=heatmap]")
    page.wait_for_function("() => document.querySelector('.link').textContent === 'live'")
    assert serving.token not in page.url

    # New steps come, and nobody asked for them.
    page.wait_for_function(COVERS, arg=max(last_step(page), ENOUGH) + 20, timeout=FOLLOWED_MS)

    # Zoomed, it asks for single steps, and gets them.
    plot = page.locator("[data-part=cells]")
    plot.focus()
    for key in ("ArrowDown", "+", "+"):
        page.keyboard.press(key)
    page.wait_for_function(FINE, timeout=FOLLOWED_MS)  # of these steps at least: what is there is not asked for again
    zooms = [url for url in asked if "/api/heatmap?" in url]
    assert zooms
    steps, fine = (str(plot.get_attribute(name)) for name in ("data-steps", "data-fine"))
    first, last = fine.split("-")
    assert any(f"first={first}&last={last}" in url for url in zooms)

    # A fault shows up by itself, and what is looked at stays.
    control.write_text(f"FAKEGPU_SLOW_RANK={SLOW}\nFAKEGPU_SLOW_FACTOR=2.5\n")
    page.locator(".verdict", has_text=re.compile(rf"degraded.*rank {SLOW}", re.IGNORECASE | re.DOTALL)).wait_for(
        timeout=2 * FOLLOWED_MS
    )
    assert plot.get_attribute("data-steps") == steps
    assert f"steps={steps}" in page.url
    assert page.locator(".notice").is_hidden()
