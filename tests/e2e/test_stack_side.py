"""Which real processes and threads the stack side looks at."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest

from argus.live.sides import stack_samples
from tests.unit.live.sides.test_stack_samples import PID, Session

pytestmark = pytest.mark.core


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    return Session(monkeypatch)


def test_a_process_that_came_is_looked_at_at_once(session: Session) -> None:
    while session.side._poll_s < stack_samples.LONGEST_POLL_S:
        session.go()
    with subprocess.Popen(["sleep", "60"]) as other:
        session.job.members[other.pid] = SimpleNamespace(rank=4, state="traced")
        session.side.look(session.now)
        assert session.side._poll_s == stack_samples.POLL_S
        assert session.side.due <= session.now
        other.kill()


def test_a_process_that_ends_is_seen_to_and_its_number_may_be_another_s(session: Session) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        session.job.members[other.pid] = SimpleNamespace(rank=4, state="traced")
        session.side.look(session.now)
        own, its = (session.side._processes.by_pid[pid] for pid in (PID, other.pid))
        session.side.look(session.now)
        assert not its.ended
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        session.side.look(session.now)
        assert (own.ended, its.ended) == (False, True)
    del session.job.members[other.pid]
    for _ in range(4):
        session.go()
    assert list(session.side._processes.by_pid) == [PID]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(its.pidfd)


def test_threads_are_looked_up_alone_as_long_as_all_of_them_are_known(session: Session) -> None:
    """A thread that was begun since the last reading is in no list of theirs."""
    asked = session.sampler.asked
    for _ in range(3):
        session.go(10)
    own = sorted(int(name) for name in os.listdir("/proc/self/task"))
    assert asked[-1] == own
    session.sampler.cloned += 1
    session.go(10)
    session.go(10)
    assert asked[-2:] == [None, own]
    with subprocess.Popen(["sleep", "60"]) as other:
        session.job.members[other.pid] = SimpleNamespace(rank=4, state="traced")
        session.side.look(session.now)
        session.go(10)
        session.go(10)
        assert asked[-2:] == [None, [*own, other.pid]], "a process that came"
        other.kill()
