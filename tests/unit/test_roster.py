"""How processes are looked at again."""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace

import pytest

from argus import roster
from argus.capture.names import KernelNames
from argus.capture.targets import cpu_ns
from argus.roster import Roster


def test_what_a_process_maps_is_read_again_only_after_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = roster.executable_mappings
    monkeypatch.setattr(roster, "executable_mappings", lambda pid: [read.append(pid), *real(pid)][1:])
    who = Roster(SimpleNamespace(), KernelNames(), follow=False, job=None, run=1)  # type: ignore[arg-type]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"it runs\n")
        process.stdin.flush()
        process.stdout.readline()
        ran = -1
        while ran != (ran := cpu_ns(process.pid)):  # until it waits for more
            time.sleep(0.05)
        target = SimpleNamespace(libraries=[])
        for _ in range(3):
            who._look_for_libraries(process.pid, target)  # type: ignore[arg-type]
        assert read == [process.pid]
        process.stdin.write(b"and again\n")
        process.stdin.flush()
        process.stdout.readline()
        who._look_for_libraries(process.pid, target)  # type: ignore[arg-type]
        assert read == [process.pid] * 2
        process.kill()
    assert cpu_ns(process.pid) == -1, "it has ended"
