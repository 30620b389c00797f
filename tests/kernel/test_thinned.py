"""What is observed less, on real BPF programs: it stops, the rest goes on, and it comes back."""

from __future__ import annotations

import subprocess
import time

import pytest

from argus.capture.probes import Probes
from argus.capture.process.targets import open_target
from argus.capture.sampler import StackProbes, run_time_statistics
from argus.model.event_kinds import is_launch
from argus.model.losses import UNKNOWN
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
        probes.follow_waits(UNKNOWN, False)
        before = counted()
        time.sleep(1)
        assert counted() <= before + 1, "but for the one that it was in"
        begun = time.monotonic_ns()
        probes.follow_waits(UNKNOWN, True)
        wait_until(lambda: counted() > before + 21, what="waits once more")
        rows = probes.drain(final=True).counts
        # None began while nobody looked.
        assert len(rows)
        assert int(rows["first_ns"][rows["last_ns"] > begun + 10**8].min(initial=begun)) >= begun
    finally:
        probes.close()
        process.kill()
        process.wait()


def test_waits_of_one_owner_are_not_followed_and_those_of_another_are() -> None:
    """And the time that the programs take is that of the owner whose threads run them."""
    often, seldom = (1001, ""), (1002, "")
    processes = [subprocess.Popen(["sh", "-c", f"while :; do sleep {pause}; done"]) for pause in (0.003, 0.1)]
    probes = StackProbes(rate_hz=0, off_cpu_ns=1000)
    try:
        with run_time_statistics():
            for process, owner in zip(processes, (often, seldom), strict=True):
                probes.add_target(process.pid, owner)
            waits, since_ns = dict.fromkeys((process.pid for process in processes), 0), 0

            def waited(which: int) -> int:
                counts = probes.drain().counts
                counts = counts[counts["first_ns"] > since_ns]
                for pid in waits:
                    waits[pid] += int(counts["count"][counts["pid"] == pid].sum())
                return waits[processes[which].pid]

            def only_the_other_is_followed() -> None:
                nonlocal since_ns
                since_ns = time.monotonic_ns() + 10**8  # but for the one that it was in
                waits.update(dict.fromkeys(waits, 0))
                wait_until(lambda: waited(1) > 5, what="waits of the other")
                assert waits[processes[0].pid] == 0

            wait_until(lambda: waited(0) > 200 and waited(1) > 5, what="waits of both")
            times = probes.owners.times()
            assert times[often][1] > 3 * times[seldom][1] > 0
            assert times[often][0] == times[seldom][0] == 0, "nothing is sampled"
            together = sum(switched for _, switched in times.values())
            assert together < 1.5 * probes.cpu_ns() + 10**6, "the kernel's own measure, of all that ran them"
            probes.follow_waits(often, False)
            only_the_other_is_followed()
            probes.remove_target(processes[0].pid)
            probes.add_target(processes[0].pid, often)
            assert probes.owners.times()[often][1] < times[often][1], "times of an owner begin with its processes"
            only_the_other_is_followed()
            probes.follow_waits(often, True)
            wait_until(lambda: waited(0) > 20, what="waits once more")
    finally:
        probes.close()
        for process in processes:
            process.kill()
            process.wait()
