"""What all tests share: where things are, and what may be skipped."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.stores import new_store

if TYPE_CHECKING:
    from argus.store.open import Store

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("ARGUS_CACHE_DIR", str(ROOT / "build" / "cache"))
FAKEGPU_BUILD = Path(os.environ.get("FAKEGPU_BUILD", ROOT / "build" / "fakegpu"))


KERNEL_TEST = "marked kernel"
"""Keyword of reports of kernel tests. Their own word is one of every test below a folder of that name, too."""


class Failures:
    """Prints each failure at once: a run that is cut short sums nothing up. Several runs at once, which scripts/test
    shows one after the other, gather theirs in the file that ARGUS_FAILED_TESTS names."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            output = str(report.longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
            line = f"FAILED {report.nodeid} ({report.when}): {output[:1000]}"
            reporter.ensure_newline()
            reporter.write_line(line, red=True)
            if gathered := os.environ.get("ARGUS_FAILED_TESTS"):
                with open(gathered, "a", encoding="utf-8") as file:
                    file.write(line + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Tests send Ctrl-C and SIGHUP to programs they start. A shell that runs the tests in the background has the one
    ignored, nohup the other, and whatever is started inherits that."""
    # A deadline would measure how busy the machine is. In CI the same inputs each time: what Hypothesis finds at random
    # elsewhere becomes an example.
    same = os.environ.get("ARGUS_KERNEL_TESTS") == "required"
    hypothesis.settings.register_profile("argus", deadline=None, derandomize=same)
    hypothesis.settings.load_profile("argus")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(Failures(config))


def beyond_core(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """What scripts/test leaves to scripts/test --all: the cases of tests marked ``thorough`` after their ``first``."""
    seen: Counter[str] = Counter()
    beyond = []
    for item in items:
        if marker := item.get_closest_marker("thorough"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > marker.kwargs.get("first", 0):
                beyond.append(item)
    return beyond


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Kernel tests need root. Without it they are skipped, unless ARGUS_KERNEL_TESTS=required (as in CI)."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "unit"):
            item.add_marker(pytest.mark.unit)
        if item.get_closest_marker("kernel") or item.path.is_relative_to(ROOT / "tests" / "kernel"):
            item.keywords[KERNEL_TEST] = True
    if os.environ.get("ARGUS_CORE"):
        thorough = set(beyond_core(items))
        config.hook.pytest_deselected(items=list(thorough))
        items[:] = [item for item in items if item not in thorough]
    if os.geteuid() == 0:
        return
    if os.environ.get("ARGUS_KERNEL_TESTS") == "required":
        raise pytest.UsageError("ARGUS_KERNEL_TESTS=required, but this is not root")
    for item in items:
        if item.get_closest_marker("kernel"):
            item.add_marker(pytest.mark.skip(reason="loads BPF programs: needs root"))


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end. The garbage collector need not look at them: 3 % of the CPU time."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The embedded engine yields to the job that is traced, and gets a tenth of a busy CPU. Where no job is measured it
    gets its share, or tests of the store would take that much longer beside other work."""
    if item.get_closest_marker("alone"):
        os.environ.pop("ARGUS_ENGINE_NICE", None)
    else:
        os.environ["ARGUS_ENGINE_NICE"] = "0"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says loudly that kernel tests were skipped."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if KERNEL_TEST in report.keywords]
    if skipped:
        terminalreporter.write_line(f"WARNING: {len(skipped)} kernel tests were skipped", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skipped kernel test fails the run, whatever its reason."""
    if os.environ.get("ARGUS_KERNEL_TESTS") != "required":
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return  # one of several processes that test: their parent has all reports
    if any(KERNEL_TEST in report.keywords for report in reporter.stats.get("skipped", [])):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def fakegpu() -> Path:
    """Where the fake GPU was built."""
    if not (FAKEGPU_BUILD / "fake_train").exists():
        pytest.fail("the fake GPU is not built: run scripts/setup")
    return FAKEGPU_BUILD


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Store]:
    """A store without tables."""
    from argus.store.open import open_store

    with open_store(f"chdb://{tmp_path}/store") as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with all tables, for all tests of a file."""
    from argus.store.open import open_store

    with open_store(new_store(tmp_path_factory.mktemp("shared"))) as opened:
        yield opened


@pytest.fixture
def store(shared: Store) -> Store:
    """The same, without rows."""
    from argus.store.schema_files import table_columns

    with shared.lease() as client:
        # To empty 45 tables takes 50 ms and more, and few have anything.
        filled = client.query("SELECT DISTINCT table FROM system.parts WHERE active AND database = currentDatabase()")
        for table in {*table_columns(), "iteration_rollup"} & {name for (name,) in filled.result_rows}:
            client.command(f"TRUNCATE TABLE {table}")
    return shared
