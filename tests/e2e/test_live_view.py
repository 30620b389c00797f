"""``argus trace`` on a terminal, from its first frame to the verdict that closes it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from run import Job

from tests.e2e.conftest import ARGUS, Argus, Log, pid_words
from tests.kernel.conftest import wait_for_cuda
from tests.terminal import Terminal

pytestmark = pytest.mark.kernel

SLOW = {"FAKEGPU_SLOW_RANK": "2", "FAKEGPU_SLOW_FACTOR": "2"}
RANK = re.compile(r"^ +(\d+) +(?:\d,\d{3}|\d{1,3}|\d\d\.\d|\d\.\d\d) (?:ns|µs|ms|s)\b", re.M)


def first_rank(terminal: Terminal) -> str:
    """The rank that stands first in the table."""
    found = RANK.search(terminal.text)
    return found[1] if found else ""


def is_whole(terminal: Terminal) -> bool:
    """Whether a frame with a finding is there, and nothing else."""
    rows = terminal.rows
    return (
        rows[0].startswith(" DEGRADED  fake_train  4 ranks")
        and rows[1].startswith("step ")
        and first_rank(terminal) == "2"
        and rows[-1].startswith("Argus: ")
        and terminal.text.count("DEGRADED") == terminal.text.count("Argus: ") == 1
    )


def test_the_late_rank_stands_first_and_the_verdict_ends_the_trace(store_url: str, tmp_path: Path) -> None:
    log = Log(tmp_path, 4)
    with Job(ranks=4, args=log.args, env=SLOW) as job, Terminal(80, 24) as terminal:
        wait_for_cuda(job.pids)
        terminal.run(shlex.join([*ARGUS, "trace", *pid_words(job.pids), "--store", store_url]))
        terminal.wait(lambda: terminal.in_alternate, what="the live view")
        terminal.wait(lambda: first_rank(terminal) == "2", what="the late rank, before any verdict")
        # What the finding is, is the diagnosis's own test; here that it is shown, with what it rests on and its advice.
        terminal.wait(lambda: is_whole(terminal), what="the finding")
        assert re.search(r"^\w.*  rank 2 on .*since step", terminal.text, re.M)
        assert "  · " in terminal.text
        assert "  → " in terminal.text
        for columns, lines in ((60, 20), (120, 40)):
            terminal.resize(columns, lines)
            terminal.wait(lambda: is_whole(terminal), what=f"{columns}x{lines}")
        terminal.type("g")
        terminal.wait_for("GPU times: off")
        terminal.type("q")
        terminal.wait(lambda: terminal.modes_after is not None, what="the end")
        assert terminal.modes_after
        assert not terminal.in_alternate
        output = terminal.text
        verdict, evidence, action, coverage, cost = (
            output.index(words)
            for words in ("DEGRADED  fake_train", "   · rank 2", "   → ", "coverage: ", "overhead: ")
        )
        assert verdict < evidence < action < coverage < cost
        assert re.search(r"^next: argus diagnose -v", output, re.M)


def test_suspended_resumed_and_interrupted(store_url: str) -> None:
    with Job(ranks=1) as job, Terminal(80, 24) as terminal:
        wait_for_cuda(job.pids)
        words = [*ARGUS, "trace", *pid_words(job.pids), "--store", store_url]
        terminal.type(f"{shlex.join(words)}\n")
        terminal.wait(lambda: terminal.rows[-1].startswith("Argus: "), what="the live view")
        terminal.type("\x1a")
        terminal.wait_for("Stopped")
        assert not terminal.in_alternate
        terminal.type("fg\n")
        terminal.wait(lambda: terminal.rows[-1].startswith("Argus: "), what="the live view after fg")
        terminal.type("\x03")
        terminal.wait_for("next: argus diagnose")
        assert not terminal.in_alternate
        assert terminal.cursor_shown
        assert job.poll() == [None]


def test_two_interrupts_at_once_give_the_terminal_back(store_url: str) -> None:
    with Job(ranks=1) as job, Terminal(80, 24) as terminal:
        wait_for_cuda(job.pids)
        terminal.run(shlex.join([*ARGUS, "trace", *pid_words(job.pids), "--store", store_url]))
        terminal.wait(lambda: terminal.rows[-1].startswith("Argus: "), what="the live view")
        terminal.type("\x03")
        terminal.type("\x03")
        terminal.wait(lambda: terminal.modes_after is not None, what="the end")
        assert terminal.modes_after
        assert not terminal.in_alternate
        assert terminal.cursor_shown
        assert "Traceback" not in terminal.text


def test_a_healthy_job_ends_with_its_verdict_in_plain_lines(argus: Argus) -> None:
    with Job(ranks=2) as job:
        wait_for_cuda(job.pids)
        done = argus("trace", *pid_words(job.pids), "--steps", "60")
        without = argus("trace", *pid_words(job.pids), "--steps", "5", "--no-diagnose", "--plain")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (verdict,) = [at for at, line in enumerate(lines) if re.match("(HEALTHY|DEGRADED|INCONCLUSIVE)  fake_train", line)]
    (coverage,) = [at for at, line in enumerate(lines) if line.startswith("coverage: complete")]
    assert verdict < coverage
    assert "\x1b" not in done.stdout
    assert without.returncode == 0, without.stderr
    assert not re.search("HEALTHY|DEGRADED|INCONCLUSIVE", without.stdout)
    assert "next: argus diagnose" in without.stdout


def test_nothing_recorded_is_nothing_to_diagnose(argus: Argus) -> None:

    with subprocess.Popen(["sleep", "300"]) as sleeping:
        try:
            done = argus("trace", "--pid", str(sleeping.pid), "--duration", "2")
        finally:
            sleeping.kill()
    assert done.returncode == 0, done.stderr
    assert "nothing to diagnose" in done.stdout
    assert "next:" not in done.stdout
    assert "complete, nothing was lost" not in done.stdout
