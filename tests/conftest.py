"""What all tests share: where things are, and what may be skipped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("ARGUS_CACHE_DIR", str(ROOT / "build" / "cache"))
FAKEGPU_BUILD = Path(os.environ.get("FAKEGPU_BUILD", ROOT / "build" / "fakegpu"))


class Failures:
    """Tells of each failure at once: a run that is cut short sums nothing up. Several runs at once, which scripts/test
    shows one after the other, gather theirs in the file that ARGUS_FAILED_TESTS names."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(report.longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
            line = f"FAILED {report.nodeid} ({report.when}): {said[:1000]}"
            reporter.ensure_newline()
            reporter.write_line(line, red=True)
            if gathered := os.environ.get("ARGUS_FAILED_TESTS"):
                with open(gathered, "a", encoding="utf-8") as file:
                    file.write(line + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Tests send Ctrl-C and SIGHUP to programs they start. A shell that runs the tests in the background has the one
    ignored, nohup the other, and whatever is started inherits that."""
    if os.environ.get("ARGUS_KERNEL_TESTS") == "required":
        # There a change is judged; what Hypothesis finds at random elsewhere becomes an example.
        hypothesis.settings.register_profile("same", derandomize=True)
        hypothesis.settings.load_profile("same")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(Failures(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Kernel tests need root. Without it they are skipped, unless ARGUS_KERNEL_TESTS=required (as in CI)."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "unit"):
            item.add_marker(pytest.mark.unit)
    if os.geteuid() == 0:
        return
    if os.environ.get("ARGUS_KERNEL_TESTS") == "required":
        raise pytest.UsageError("ARGUS_KERNEL_TESTS=required, but this is not root")
    for item in items:
        if item.get_closest_marker("kernel"):
            item.add_marker(pytest.mark.skip(reason="loads BPF programs: needs root"))


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
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "kernel" in report.keywords]
    if skipped:
        terminalreporter.write_line(f"WARNING: {len(skipped)} kernel tests were skipped", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skipped kernel test fails the run, whatever its reason."""
    if os.environ.get("ARGUS_KERNEL_TESTS") != "required":
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return  # one of several processes that test: their parent has all reports
    if any("kernel" in report.keywords for report in reporter.stats.get("skipped", [])):
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
