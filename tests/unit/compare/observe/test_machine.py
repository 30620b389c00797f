"""The machine's state from made-up /proc and /sys, and what of it disturbed a run; what is not there is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from argus.compare.observe.machine import TICKS_S, Machine, during, read_machine

STAT = """cpu  1000 200 300 9000 50 10 40 60 7 0
cpu0 500 100 150 4500 25 5 20 30 3 0
cpu1 500 100 150 4500 25 5 20 30 4 0
intr 1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        "proc/stat": STAT,
        "proc/loadavg": "1.25 0.5 0.1 1/100 5\n",
        "proc/pressure/cpu": "some avg10=1.0 avg60=0 avg300=0 total=2500000\nfull avg10=0.0 total=7\n",
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nthrottled_usec 3000000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2000000\n",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "3000000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_the_kernel_says(root: Path) -> None:
    found = read_machine(root)
    assert found.cpus == 2
    assert found.busy_s == 1550 / TICKS_S, "guests' time is in the user's"
    assert (found.steal_s, found.iowait_s) == (60 / TICKS_S, 50 / TICKS_S)
    assert (found.load, found.cpu_wait_s, found.memory_share) == (1.25, 2.5, 0.75)
    assert (found.throttled_s, found.frequency_mhz) == (3.0, 2500)


def test_a_cgroup_of_version_1(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/job\n")
    (root / "sys/fs/cgroup/cpu/job").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu/job/cpu.stat").write_text("nr_periods 3\nthrottled_time 4000000000\n")
    assert read_machine(root).throttled_s == 4.0


def test_what_is_not_there_is_not_known(tmp_path: Path) -> None:
    found = read_machine(tmp_path)
    assert found.cpus >= 1
    assert {found.busy_s, found.steal_s, found.load, found.cpu_wait_s, found.memory_share, found.throttled_s} == {None}
    assert found.frequency_mhz is None
    shares = during(found, Machine(found.at_s + 5, found.cpus), 1.0)
    assert set(shares.values()) == {None}


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu a b c d e f g\n", "cpu 1 2\n", "total=x\n"])
def test_damaged_files_are_not_known(root: Path, text: str) -> None:
    for name in ("proc/stat", "proc/loadavg", "proc/pressure/cpu", "proc/meminfo", "proc/self/cgroup"):
        (root / name).write_text(text)
    found = read_machine(root)
    assert (found.busy_s, found.cpu_wait_s, found.memory_share, found.throttled_s) == (None,) * 4


def test_shares_are_of_all_cpus_without_what_is_the_run_s_own() -> None:
    before = Machine(10.0, 4, 100.0, 1.0, 0.0, load=2.0, cpu_wait_s=1.0, throttled_s=0.0)
    after = Machine(20.0, 4, 112.0, 3.0, 4.0, load=9.0, cpu_wait_s=6.0, throttled_s=1.0)
    shares = during(before, after, own_cpu_s=8.0)
    assert shares["others_cpu_share"] == 0.15, "4 s of others and 2 s of steal, of 40"
    assert (shares["steal_share"], shares["iowait_share"]) == (0.05, 0.1)
    assert (shares["cpu_wait_share"], shares["throttled_share"], shares["load_before"]) == (0.5, 0.1, 2.0)
    assert during(before, after, own_cpu_s=50.0)["others_cpu_share"] == 0.05, "ticks are coarse: never below steal"


def test_of_a_short_time_shares_are_not_known() -> None:
    shares = during(Machine(10.0, 4, 100.0, 1.0), Machine(10.05, 4, 100.2, 1.0), 0.05)
    assert shares["others_cpu_share"] is None
