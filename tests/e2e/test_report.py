"""``argus report`` as people run it: the file, its size, every query of it, hostile names, and what goes wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argus.report.build import build_page
from argus.store.open import Store, open_store
from argus.store.reader import latest_run
from tests import forked
from tests.builders import flight_dumps, report_jobs, training_job
from tests.e2e.conftest import Argus
from tests.stores import new_store


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with a job that has a slow GPU, an import of steps, and dumps. Its engine goes on from test to test."""
    folder = tmp_path_factory.mktemp("report")
    store_url = new_store(folder)
    argus = argus_with(store_url)
    faults = [flight_dumps.Fault("cpu", 2, 9)]
    flight_dumps.write(folder / "dumps", flight_dumps.run(flight_dumps.job(1, 1, 4), faults))
    trace, meta = training_job.write(folder, training_job.rows(steps=4))
    with open_store(store_url) as store, store.lease():
        report_jobs.write_slow(store)
        assert argus("import", "flight-recorder", str(folder / "dumps"), "--job", "dumped").returncode == 0
        assert argus("import", "whatif", str(trace), "--meta", str(meta), "--job", "operations").returncode == 0
        yield store


@pytest.fixture(scope="module")
def url(opened: Store) -> str:
    return opened.url


def argus_with(store_url: str) -> Argus:
    """``argus VERB …`` against a store."""
    return lambda *words: forked.argus(*words, "--store", store_url)


@pytest.fixture
def report(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Argus:
    """``argus VERB …`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return argus_with(url)


def test_a_page_is_written_here_and_its_verdict_said(report: Argus, tmp_path: Path) -> None:
    done = report("report", "--job", "slow")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"argus-slow-\d+\.html", file.name)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{file.name}: ")
    assert f"rank {report_jobs.SLOW} on node0000" in lines[1]
    assert "without: Links of rings" in done.stdout
    assert file.stat().st_size < 1_000_000
    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 or os.geteuid() != 0
    assert done.stderr == ""


@pytest.mark.parametrize("job", ["dumped", "operations"])
def test_imports_have_a_page(report: Argus, tmp_path: Path, job: str) -> None:
    done = report("report", "--job", job, "-o", "page.html")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(report("diagnose", "--job", job, "--no-store", "--format", "json").stdout)
    assert done.stdout.splitlines()[1].lower().startswith(verdict["status"])
    assert (tmp_path / "page.html").stat().st_size > 1_000


def test_every_query_of_a_page_runs_in_argus_sql(report: Argus, opened: Store) -> None:
    page, _ = build_page(opened, *latest_run(opened, "slow"))
    texts = [sql["text"] for panel in page["panels"] for sql in panel["sql"]]
    assert len(texts) > 20
    for text in (texts[0], texts[-1]):
        done = report("sql", "--format", "csv", text)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_hostile_names_are_text(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: Any) -> None:
    store_url = new_store(tmp_path_factory.mktemp("hostile"))
    with open_store(store_url) as store:
        report_jobs.write_hostile(store)
    monkeypatch.chdir(tmp_path)
    done = argus_with(store_url)("report")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"[A-Za-z0-9._-]+", file.name)
    document = file.read_text()
    assert len(document) < 2_000_000
    for control in ("\x1b", "\u202e", "\u2066", "\x00"):
        assert control not in document
        assert control not in done.stdout
    for markup in ("<script>alert", "<img src=x", "</title><!--"):
        assert markup not in document


def test_standard_output_and_devices(report: Argus, tmp_path: Path) -> None:
    done = report("report", "--job", "slow", "-o", "-")
    assert done.returncode == 0
    assert done.stdout.startswith("<!")
    assert done.stdout.rstrip().endswith("</html>")
    assert list(tmp_path.iterdir()) == []
    full = report("report", "--job", "slow", "-o", "/dev/full")
    assert full.returncode == 1
    assert "cannot be written: No space left on device" in full.stderr
    assert len(full.stderr.splitlines()) == 2
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    folder = report("report", "--job", "slow", "-o", str(tmp_path / "nowhere" / "page.html"))
    assert folder.returncode == 1
    assert "Traceback" not in folder.stderr


def test_what_is_not_there_is_one_line(report: Argus, tmp_path: Path) -> None:
    for words, expected in (
        (("--job", "nope"), "no job 'nope' is stored"),
        (("--job", "slow", "--run", "3"), "has no run 3"),
        (("--since", "5m", "--last", "5m"), "--last is --since with a span"),
    ):
        done = report("report", *words)
        assert done.returncode in (2, 3)
        assert expected in done.stderr.splitlines()[0]
    empty = argus_with(f"chdb://{tmp_path}/empty")("report")
    assert empty.returncode == 3
    assert "nothing is stored yet" in empty.stderr
    assert not list(tmp_path.glob("*.html"))


def test_a_page_is_not_for_a_terminal(url: str) -> None:
    parent, child = pty.openpty()
    done = forked.argus("report", "-o", "-", "--store", url, stdout=child)
    os.close(child)
    os.close(parent)
    assert done.returncode == 2
    assert "a page is not for a terminal" in done.stderr


def test_only_some_steps(report: Argus, url: str) -> None:
    done = report("report", "--job", "slow", "--steps", "50:69", "-o", "some.html")
    assert done.returncode == 0, done.stderr
    assert "steps 50 to 69" in done.stdout
