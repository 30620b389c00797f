"""What is observed less, on real BPF programs: it stops, the rest goes on, and it comes back."""

from __future__ import annotations

import subprocess
import time

import pytest

from argus.capture.probes import Probes
from argus.capture.process.targets import open_target
from argus.capture.sampler import StackProbes
from argus.model.event_kinds import is_launch
from argus.model.records import Counter, StackCounter
from tests.kernel.conftest import wait_for_cuda, wait_until

pytestmark = pytest.mark.kernel


def test_launches_are_probed_again_after_they_were_not() -> None:
    from run import Job

    with Job(ranks=1) as job:
        wait_for_cuda(job.pids)
        target, probes = open_target(job.pids[0]), Probes(launch_durations=True)
        try:
            probes.add_target(target.pid)
            for library in target.libraries:
                probes.attach(library, target.pid)

            seen = {True: 0, False: 0}

            def hits_of(launching: bool, at_least: int) -> bool:
                taken = is_launch(probes.launches.drain())
                seen[True] += int(taken.sum())
                seen[False] += int((~taken).sum())
                return seen[launching] >= at_least

            wait_until(lambda: hits_of(True, 300), what="launches")
            probes.detach_optional("launches")
            hits_of(True, 0)
            seen.update({True: 0, False: 0})
            # Copies and waits go on, some twelve a step, of which each had 150 launches.
            wait_until(lambda: hits_of(False, 100), what="other calls")
            assert seen[True] == 0
            probes.attach_optional("launches")
            wait_until(lambda: hits_of(True, 300), what="launches once more")
            assert probes.counters()[Counter.LAUNCHES_DROPPED] == 0
        finally:
            probes.close()
            target.close()


def test_waits_are_followed_only_while_they_are_to_be() -> None:
    process = subprocess.Popen(["sh", "-c", "while :; do sleep 0.005; done"])
    probes = StackProbes(rate_hz=0, off_cpu_ns=1000)
    try:
        probes.add_target(process.pid)

        def counted() -> int:
            probes.drain()
            return probes.counters()[StackCounter.OFF_CPU]

        wait_until(lambda: counted() > 20, what="waits")
        probes.follow_waits(False)
        before = counted()
        time.sleep(1)
        assert counted() <= before + 1, "but for the one that it was in"
        begun = time.monotonic_ns()
        probes.follow_waits(True)
        wait_until(lambda: counted() > before + 21, what="waits once more")
        rows = probes.drain(final=True).counts
        # None began while nobody looked.
        assert len(rows)
        assert int(rows["first_ns"][rows["last_ns"] > begun + 10**8].min(initial=begun)) >= begun
    finally:
        probes.close()
        process.kill()
        process.wait()
