"""What all tests share: where things are, and what may be skipped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAKEGPU_BUILD = ROOT / "build" / "fakegpu"


def pytest_configure() -> None:
    """Tests send Ctrl-C to programs they start. A shell that runs the tests in the background has it ignored, and
    whatever is started inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Kernel tests need root. Without it they are skipped, unless ARGUS_KERNEL_TESTS=required (as in CI)."""
    if os.geteuid() == 0:
        return
    if os.environ.get("ARGUS_KERNEL_TESTS") == "required":
        raise pytest.UsageError("ARGUS_KERNEL_TESTS=required, but this is not root")
    for item in items:
        if item.get_closest_marker("kernel"):
            item.add_marker(pytest.mark.skip(reason="loads BPF programs: needs root"))


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
    if any("kernel" in report.keywords for report in reporter.stats.get("skipped", [])):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def fakegpu() -> Path:
    """Where the fake GPU was built."""
    if not (FAKEGPU_BUILD / "fake_train").exists():
        pytest.fail("the fake GPU is not built: run scripts/setup")
    return FAKEGPU_BUILD
