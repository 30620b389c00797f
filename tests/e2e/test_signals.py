"""Ctrl-C at many moments of real commands: they end soon, say nothing strange, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.conftest import wait_until

ARGUS = str(Path(sys.executable).parent / "argus")
SOON_S = 30.0
"""What half a second may become on a machine that is busy with other tests. That a signal is not kept until something
is done shows in the output and in the exit code."""
LOOP = "import time\nprint('runs', flush=True)\nwhile True:\n    sum(range(20000)); time.sleep(0.01)\n"


@pytest.fixture(scope="module")
def target() -> Iterator[int]:
    """A Python program that computes a little."""
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


class Command:
    """``argus VERB …`` in a process group of its own, as in a terminal: Ctrl-C reaches its children, too."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [ARGUS, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.pid = self._process.pid
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line.decode(errors="replace")

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    def end(self, timeout_s: float) -> int:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            pytest.fail(f"it has not ended after {timeout_s} s; it printed: {self.output}")
        self._reader.join(SOON_S)
        assert "Traceback" not in self.output
        assert "Bad file descriptor" not in self.output
        assert "internal error" not in self.output
        return code

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output or self._process.poll() is not None, 60, text)
        assert text in self.output, self.output


STOPPED = (130, -signal.SIGINT)
"""The second: before Python has a handler, so before Argus's first line. Shells call both 130."""


def processes_with(word: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if word.encode() in Path("/proc", pid, "cmdline").read_bytes() and int(pid) != os.getpid():
                found.append(int(pid))
    return found


@pytest.mark.kernel
def test_a_trace_ends_soon_whenever_it_is_interrupted(target: int, store_url: str) -> None:
    codes = []
    for delay_s in (0.0, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.8, 1.2, 1.7, 2.5):
        trace = Command("trace", "--pid", str(target), "--store", store_url)
        time.sleep(delay_s)
        trace.interrupt()
        wait_until(
            lambda trace=trace: trace._process.poll() is not None or "storing what is left" in trace.output,
            SOON_S,
            "an answer",
        )
        codes.append(trace.end(60))
        if codes[-1] == 0:
            assert "storing what is left (a second Ctrl-C gives it up)" in trace.output
        else:
            assert codes[-1] in STOPPED
            assert "job " not in trace.output
            assert trace.output.count("nothing was stored") <= 1
    assert codes[0] in STOPPED, "before it has begun"
    assert 130 in codes, "while it begins"
    folder = store_url.removeprefix("chdb://")
    wait_until(lambda: not processes_with(folder), 20, "the store's engine to end")


@pytest.mark.kernel
def test_a_second_interrupt_gives_up_what_is_not_stored(target: int, store_url: str) -> None:
    for pause_s in (0.05, 0.2):
        trace = Command("trace", "--pid", str(target), "--store", store_url)
        trace.wait_for("job ")
        time.sleep(1.0)
        trace.interrupt()
        time.sleep(pause_s)
        trace.interrupt()
        code = trace.end(SOON_S)
        # The second may come when all is done, and changes nothing then.
        assert code in (0, 130)
        stopped = (
            "given up" in trace.output or "stopped at once" in trace.output or "\ninterrupted; all" in trace.output
        )
        assert stopped == (code == 130), trace.output
        assert code == 130 or "overhead: " in trace.output


@pytest.mark.kernel
def test_a_compiler_neither_dies_of_the_terminal_s_interrupt_nor_survives_argus(
    target: int, store_url: str, tmp_path: Path
) -> None:
    trace = Command(
        "trace", "--pid", str(target), "--store", store_url, environment={"ARGUS_CACHE_DIR": str(tmp_path / "cache")}
    )
    # Its only argument is who asked for it.
    name = f"argus.capture.kernel.compile\0{trace.pid}\0"
    wait_until(lambda: bool(processes_with(name)), 30, "the compiler")
    (compiler,) = processes_with(name)
    assert os.getsid(compiler) == compiler, "of another session: the terminal's signals do not reach it"
    trace.interrupt()
    assert trace.end(SOON_S) == 130, "not after it has attached"
    assert trace.output.endswith("argus: stopped before the trace began; nothing was stored\n")
    wait_until(lambda: not processes_with(name), SOON_S, "the compiler to end")


@pytest.mark.parametrize(
    "words", [("sql", "SELECT sleepEachRow(1) FROM numbers(60) SETTINGS max_block_size = 1"), ("check",), ("health",)]
)
def test_other_verbs_end_soon_too(words: tuple[str, ...], store_url: str) -> None:
    for delay_s in (0.03, 0.4, 1.0):
        more = ("--store", store_url) if words[0] == "sql" else ()
        verb = Command(*words, *more, environment={"ARGUS_STORE": store_url})
        time.sleep(delay_s)
        verb.interrupt()
        code = verb.end(SOON_S)
        assert code in (*STOPPED, 0, 1, 2, 3), "or it was done before"


def test_run_ends_what_watches_when_it_is_interrupted_before_the_command(store_url: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    run = Command("run", "--store", store_url, "--", "touch", str(made))
    wait_until(lambda: len(processes_with(store_url)) > 1, 30, "the watcher")
    run.interrupt()
    code = run.end(60)
    assert code in STOPPED or made.exists(), "the command had begun"
    wait_until(lambda: not processes_with(f"touch\0{made}"), SOON_S, "the watcher to end")
