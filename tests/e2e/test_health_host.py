"""Checks of the host: each with a source that is bad, and with a good one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argus.health import config
from argus.health.check import Absent, Blind, Look, Result
from argus.health.checks import _mounts, disks_full
from tests.e2e import test_health_gpu
from tests.e2e.health_node import Node
from tests.lacking import needs_mounts
from tests.security import test_stuck_tasks

CHECKS = {check.name: check for check in config.builtin()}
CPUS = "sys/devices/system/cpu"
EDAC = "sys/devices/system/edac/mc/mc0"
CLOCK = "sys/devices/system/clocksource/clocksource0/current_clocksource"
THP = "sys/kernel/mm/transparent_hugepage"
PSI = "some avg10=0.00 avg60={0} avg300=0.00 total=0\nfull avg10=0.00 avg60={1} avg300=0.00 total=0\n"
GOOD = {
    "proc/pressure/cpu": PSI.format("20.00", "0.00"),
    "proc/pressure/memory": PSI.format("0.00", "0.00"),
    "proc/pressure/io": PSI.format("1.00", "0.50"),
    "proc/meminfo": "MemTotal: 104857600 kB\nMemAvailable: 52428800 kB\nHugePages_Total: 0\n",
    "proc/vmstat": "pswpin 5\npswpout 5\noom_kill 2\n",
    f"{EDAC}/ce_count": "3",
    f"{EDAC}/ue_count": "0",
    f"{CPUS}/present": "0-3",
    f"{CPUS}/online": "0-3",
    f"{CPUS}/cpu0/cpufreq/scaling_governor": "performance",
    f"{CPUS}/cpu0/thermal_throttle/package_throttle_count": "7",
    "proc/stat": "cpu  1000 0 1000 97000 0 0 0 1000 0 0\n",
    "proc/schedstat": "version 17\ncpu0 0 0 0 0 0 0 900 5000000000 3\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 5 kB\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 5 kB\n",
    "proc/sys/kernel/numa_balancing": "0",
    f"{THP}/enabled": "always [madvise] never",
    f"{THP}/defrag": "always defer defer+madvise [madvise] never",
    "proc/diskstats": "   8       0 sda 1000 0 0 5000 1000 0 0 5000 0 0 0\n",
    "sys/block/sda/dev": "8:0",
    "proc/sys/fs/file-nr": "9000 0 100000",
    "proc/loadavg": "1.0 1.0 1.0 1/500 4711",
    "proc/sys/kernel/pid_max": "32768",
    "proc/sys/kernel/threads-max": "100000",
    "proc/sys/kernel/osrelease": "6.8.0-1",
    "proc/cpuinfo": "microcode\t: 0x1\n\nmicrocode\t: 0x1\n",
    "proc/1/mountinfo": "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"
    "23 22 8:2 / /boot ro - ext4 /dev/sda2 ro\n24 22 0:9 / /snap/a ro - squashfs /dev/loop0 ro\n"
    "25 22 8:1 / /etc/x ro - ext4 /dev/sda1 rw\n",
    "etc/fstab": "/dev/sda2 /boot ext4 ro,noauto 0 2\n",
    "sys/fs/ext4/sda1/errors_count": "0",
}
"""A node's files. What counters have here, they had an hour ago."""

SHORT = {"proc/meminfo": "MemTotal: 1000000 kB\nMemFree: 9000 kB\nMemAvailable: 40000 kB\n"}

BAD: list[tuple[str, dict[str, str], str, str]] = [
    ("pressure", {"proc/pressure/io": PSI.format("90.00", "60.00")}, "warning", "stood still for I/O for 60%"),
    ("pressure", {"proc/pressure/memory": PSI.format("50.00", "30.00")}, "warning", "for memory for 30%"),
    ("pressure", {"proc/pressure/memory": PSI.format("90.00", "70.00"), **SHORT}, "critical", "for memory for 70%"),
    ("pressure", {"proc/pressure/memory": PSI.format("50.00", "30.00"), **SHORT}, "warning", "for memory for 30%"),
    # A user's control group is at its own limit (memory.high) on a node that has enough:
    ("pressure", {"proc/pressure/memory": PSI.format("90.00", "70.00")}, "warning", "for memory for 70%"),
    ("pressure", {"proc/pressure/memory": PSI.format("90.00", "70.00"), "proc/meminfo": ""}, "warning", "for 70%"),
    ("pressure", {"proc/pressure/cpu": PSI.format("99.00", "0.00")}, "warning", "waited for a CPU for 99%"),
    ("memory", {"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 40000 kB\n"}, "warning", "4.0% of"),
    ("memory", {"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 10000 kB\n"}, "critical", "1.0% of"),
    ("swap", {"proc/vmstat": "pswpin 500000\npswpout 500000\n"}, "warning", "278 pages a second"),
    ("swap", {"proc/vmstat": "pswpin 50000000\npswpout 500000\n", **SHORT}, "critical", "14028 pages a second"),
    ("swap", {"proc/vmstat": "pswpin 500000\npswpout 500000\n", **SHORT}, "warning", "278 pages a second"),
    # A user swaps his own pages (madvise, memory.high) on a node that has enough:
    ("swap", {"proc/vmstat": "pswpin 50000000\npswpout 500000\n"}, "warning", "not known to be short of memory"),
    ("swap", {"proc/vmstat": "pswpin 50000000\npswpout 0\n", "proc/meminfo": ""}, "warning", "short of memory"),
    ("oom", {"proc/vmstat": "oom_kill 3\n"}, "warning", "1 processes killed for want of memory in the last 60 min"),
    ("edac", {f"{EDAC}/ue_count": "1"}, "critical", "mc0: 1 uncorrected"),
    ("edac", {f"{EDAC}/ce_count": "53"}, "warning", "mc0: 50 corrected"),
    ("edac", {f"{EDAC}/ce_count": "1003"}, "critical", "mc0: 1000 corrected"),
    ("cpu_frequency", {f"{CPUS}/online": "0-2"}, "warning", "CPUs 0-2 of 0-3 are online"),
    ("cpu_frequency", {f"{CPUS}/cpu0/cpufreq/scaling_governor": "powersave"}, "warning", "governor powersave"),
    ("cpu_frequency", {f"{CPUS}/cpu0/thermal_throttle/package_throttle_count": "9"}, "warning", "heat 2 times"),
    ("steal", {"proc/stat": "cpu  2000 0 2000 187000 0 0 0 9000 0 0\n"}, "warning", "8.0% of CPU time"),
    ("steal", {"proc/stat": "cpu  2000 0 2000 137000 0 0 0 59000 0 0\n"}, "critical", "58.0% of CPU time"),
    ("run_queue", {"proc/schedstat": "cpu0 0 0 0 0 0 0 900 7205000000000 3\n"}, "warning", "waited 2.00 s a second"),
    ("numa", {"proc/sys/kernel/numa_balancing": "1"}, "warning", "automatic NUMA balancing is on"),
    ("huge_pages", {f"{THP}/enabled": "always madvise [never]"}, "warning", "enabled is never"),
    ("huge_pages", {f"{THP}/defrag": "[always] defer never"}, "warning", "defrag is always"),
    ("disk_slow", {"proc/diskstats": " 8 0 sda 1500 0 0 255000 1500 0 0 255000 0 0 0\n"}, "warning", "took 500 ms"),
    (
        "disk_slow", {"proc/diskstats": " 8 0 sda 1500 0 0 1505000 1500 0 0 1505000 0 0 0\n"}, "critical",
        "took 3.0 s",
    ),
    ("limits", {"proc/sys/fs/file-nr": "96000 0 100000"}, "critical", "96% of the files"),
    ("limits", {"proc/loadavg": "1 1 1 1/28000 1"}, "warning", "85% of the tasks"),
    ("limits", {"proc/sys/fs/file-nr": "85000 0 100000"}, "warning", "85% of the files"),
    ("limits", {"proc/loadavg": "1 1 1 1/32000 1"}, "critical", "98% of the tasks"),
    ("versions", {"proc/cpuinfo": "microcode\t: 0x1\n\nmicrocode\t: 0x2\n"}, "warning", "different microcode: 0x1/0x2"),
    ("read_only", {"proc/1/mountinfo": "22 1 8:1 / / ro - ext4 /dev/sda1 ro\n"}, "critical",
     "/ (/dev/sda1) is read-only"),
    ("read_only", {"proc/1/mountinfo": GOOD["proc/1/mountinfo"] + "29 22 0:7 / /tmp ro - tmpfs x rw\n"},
     "critical", "/tmp cannot be written: /tmp is read-only"),
    ("read_only", {"proc/1/mountinfo": GOOD["proc/1/mountinfo"] + "29 22 7:0 / /media/u ro - ext4 /dev/loop0 ro\n"},
     "warning", "/media/u (/dev/loop0) is read-only"),
    ("read_only", {"proc/1/mountinfo": GOOD["proc/1/mountinfo"] + "29 22 8:3 / /loop0 ro - ext4 /dev/sdloop0 ro\n"},
     "critical", "/loop0 (/dev/sdloop0) is read-only"),
    ("read_only", {"sys/fs/ext4/sda1/errors_count": "4"}, "warning", "sda1: ext4 has counted errors"),
    ("clock", {CLOCK: "hpet"}, "critical", "time is counted by hpet"),
]  # fmt: skip


def look(tmp_path: Path, name: str, files: dict[str, str], before: Result | None = None, **limits: Any) -> Result:
    node = Node(tmp_path)
    for path, text in files.items():
        node.file(path, text)
    past = [] if before is None else [(1000.0, before.figures)]
    check = CHECKS[name]
    asked = config.limits_of(check, config.Settings(limits={name: limits}))
    return check.load()(Look(asked, tmp_path / "root", before=past, now=4600.0))


@pytest.mark.parametrize(("name", "changes", "status", "text"), BAD)
def test_a_bad_source(tmp_path: Path, name: str, changes: dict[str, str], status: str, text: str) -> None:
    good = GOOD | ({CLOCK: "tsc"} if name == "clock" else {})
    before = look(tmp_path, name, good)
    unsynchronised = name == "clock" and before.text == "nothing keeps the clock right"
    assert before.status == "ok" or unsynchronised, before
    result = look(tmp_path, name, changes, before)
    assert (result.status, text in result.text) == (status, True), result
    assert result.hint
    again = look(tmp_path, name, good, before)
    assert again.status == "ok" or unsynchronised, again


@pytest.mark.parametrize("name", ["disks_full", "read_only"])
def test_what_a_user_mounts_is_no_disk_of_the_node(tmp_path: Path, name: str) -> None:
    mounts = "".join(
        f"{30 + number} 22 0:{40 + number} / /home/u{number} ro - {kind} /dev/sdz ro,user_id={uid},group_id=0\n"
        for number, (kind, uid) in enumerate((("fuse.glusterfs", 1000), ("fuse", 70), ("fuseblk", 5)))
    )
    mounts += "39 22 0:49 / /home/u9 ro - fuse  ro,user_id=1000,group_id=0\n"  # of no name
    limits = {"types": ["fuse", "fuseblk"], "paths": ["/home/u1"]} if name == "disks_full" else {}
    theirs = look(tmp_path, name, GOOD | {"proc/1/mountinfo": GOOD["proc/1/mountinfo"] + mounts}, **limits)
    assert theirs.status == "ok", theirs
    assert "/home" not in theirs.text
    look_at = Look({}, tmp_path / "root", before=[], now=0.0)
    assert not [one.path for one in _mounts.mounts(look_at) if one.path.startswith("/home")]
    node = Node(tmp_path)
    node.file("proc/1/mountinfo", mounts.replace("=1000", "=0"))
    assert [one.path for one in _mounts.mounts(look_at)] == ["/home/u0", "/home/u9"]


@pytest.mark.parametrize(
    ("device", "place", "status"),
    [
        ("/dev/sda1", "data", "critical"),
        ("/dev/loop0", "data", "warning"),
        ("/dev/ublkb1p2", "data", "warning"),
        ("/dev/loop0", "tmp", "critical"),
    ],
)
def test_a_full_image_is_critical_only_where_jobs_need_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, place: str, status: str
) -> None:
    full = SimpleNamespace(f_blocks=100, f_bfree=1, f_bavail=1, f_files=0, f_favail=0)
    monkeypatch.setattr(disks_full.os, "statvfs", lambda path: full)
    result = look(tmp_path, "disks_full", {"proc/1/mountinfo": f"30 22 7:0 / /{place} rw - ext4 {device} rw\n"})
    assert (result.status, result.text) == (status, f"/{place}: 99% of its space used")


def test_a_disk_that_a_user_s_program_plays_is_not_timed(tmp_path: Path) -> None:
    """Any user may make one where ublk is open to all (UBLK_F_UNPRIVILEGED_DEV), and let it answer slowly."""
    theirs = "259 1 ublkb0 1500 0 0 1505000 1500 0 0 1505000 0 0 0\n"
    with pytest.raises(Absent, match="no disks"):
        look(tmp_path, "disk_slow", {"proc/diskstats": theirs, "sys/block/ublkb0/dev": "259:1"})


@pytest.mark.parametrize("name", ["nbd0", "loop7", "ram0", "zram0", "sr0", "fd0", "ublkb0"])
def test_no_image_s_speed_is_a_disk_s(tmp_path: Path, name: str) -> None:
    """``_mounts.IMAGE``: all that may have a user's image behind it."""
    theirs = f"43 0 {name} 1500 0 0 1505000 1500 0 0 1505000 0 0 0\n"
    with pytest.raises(Absent, match="no disks"):
        look(tmp_path, "disk_slow", {"proc/diskstats": theirs, f"sys/block/{name}/dev": "43:0"})


LOADS = {
    "cpu": "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.fork()\nwhile 1: pass",
    # More pages of a file than the group may have, again and again.
    "memory": """import mmap, os, sys
file = os.open(sys.argv[1] + "/pages", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(60 << 20)); os.fsync(file); pages = mmap.mmap(file, 0, prot=mmap.PROT_READ)
while 1: sum(pages[k] for k in range(0, len(pages), 4096))""",
    "io": """import mmap, os, sys
file = os.open(sys.argv[1] + "/blocks", os.O_RDWR | os.O_CREAT); os.write(file, bytes(16 << 20)); os.fsync(file)
file = os.open(sys.argv[1] + "/blocks", os.O_RDONLY | os.O_DIRECT); block = mmap.mmap(-1, 1 << 20)
while 1: [os.preadv(file, [block], k << 20) for k in range(16)]""",
    "rest": "import time; time.sleep(600)",
}
MESSAGES = {
    "cpu": r"tasks waited for a CPU for \d+% of the last minute",
    "memory": r"everything stood still for memory for \d+% of the last minute",
    "io": r"everything stood still for I/O for \d+% of the last minute",
}


def mounted(kind: str, option: str = "") -> Path | None:
    """Where a cgroup hierarchy is."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, what, options, *_ = line.split()
        if what == kind and (not option or option in options.split(",")):
            return Path(place)
    return None


def test_pressure_under_real_load(tmp_path: Path) -> None:
    """Real processes, each kind in a control group of its own: the kernel counts pressure of a group as of a node, and
    what else the machine does is not in it. The minute has only begun, so thresholds are lower."""
    unified, memory = mounted("cgroup2"), mounted("cgroup", "memory")
    if os.geteuid() != 0 or unified is None or not (unified / "cgroup.pressure").exists() or not memory:
        pytest.skip("makes control groups: needs root, cgroup2 with PSI, and the memory controller")
    groups = {name: unified / f"argus-{os.getpid()}-{name}" for name in LOADS}
    bounded = memory / f"argus-{os.getpid()}"
    processes = []
    try:
        for folder in (*groups.values(), bounded):
            folder.mkdir()
        (bounded / "memory.limit_in_bytes").write_text(str(30 << 20))
        for name, program in LOADS.items():
            into = f"echo $$ > {groups[name]}/cgroup.procs; "
            into += f"echo $$ > {bounded}/cgroup.procs; " if name == "memory" else ""
            words = ["sh", "-c", into + 'exec "$@"', "sh", sys.executable, "-c", program, str(tmp_path)]
            processes.append(subprocess.Popen(words, start_new_session=True))
        pressure = tmp_path / "root" / "proc" / "pressure"
        pressure.mkdir(parents=True)

        def found(names: dict[str, str]) -> Result:
            for what, group in names.items():
                (pressure / what).unlink(missing_ok=True)
                (pressure / what).symlink_to(groups[group] / f"{what}.pressure")
            return look(tmp_path, "pressure", {}, cpu=0.02, memory=0.005, io=0.005)

        loaded, deadline = {what: what for what in MESSAGES}, time.monotonic() + 60
        while (result := found(loaded)).text.count("of the last minute") < 3 and time.monotonic() < deadline:
            time.sleep(0.5)
        assert result.status == "warning"
        assert all(re.search(pattern, result.text) for pattern in MESSAGES.values()), result.text
        for what in MESSAGES:
            alone = found({other: other if other == what else "rest" for other in MESSAGES})
            assert re.fullmatch(MESSAGES[what], alone.text), alone
        rest = found(dict.fromkeys(MESSAGES, "rest"))
        assert (rest.status, rest.text) == ("ok", "CPU 0%, memory 0%, I/O 0%")
    finally:
        for process in processes:
            os.killpg(process.pid, 9)
            process.wait()
        deadline = time.monotonic() + 10
        for folder in (*groups.values(), bounded):
            while folder.exists() and time.monotonic() < deadline:
                try:
                    folder.rmdir()
                except OSError:  # a process is still on its way out
                    time.sleep(0.02)


def test_what_a_node_must_have(tmp_path: Path) -> None:
    assert look(tmp_path, "memory", GOOD, total_gib=100.0).status == "ok"
    assert look(tmp_path, "memory", GOOD, total_gib=128.0).text.startswith("100 GiB of 128 GiB are there")
    assert look(tmp_path, "huge_pages", GOOD, reserved=512).text == "0 huge pages reserved of 512"
    assert look(tmp_path, "versions", GOOD, kernel="6.8.0-1").status == "ok"
    assert look(tmp_path, "versions", GOOD, kernel="6.9.0").text == "kernel is 6.8.0-1, not 6.9.0"
    assert look(tmp_path, "versions", GOOD, driver="570.1").text == "driver is not there, not 570.1"


def test_disks_that_are_full(tmp_path: Path) -> None:
    """Real file systems of a namespace of their own."""
    needs_mounts()
    node, disk = Node(tmp_path), tmp_path / "disk"
    disk.mkdir()
    node.limits["disks_full"] = {"types": ["tmpfs"], "paths": [str(disk)]}
    node.limits["read_only"] = {"writable": [str(disk)]}

    def within(*commands: str) -> None:
        script = f'mount -t tmpfs -o size=10m,nr_inodes=100 x {disk}; {"; ".join(commands)}; exec "$@"'
        node.before = ["unshare", "--mount", "sh", "-c", script, "sh"]

    names = ("--only", "disks_full", "--only", "read_only", "--format", "json")
    printed = []
    for commands in (
        ["true"],
        [f"head -c 9600k /dev/zero > {disk}/x"],
        [f"cp /dev/zero {disk}/x 2>/dev/null"],
        [f"for k in $(seq 95); do : > {disk}/$k; done"],
        [f"mount -o remount,ro {disk}"],
    ):
        within(*commands)
        code, output, _ = node.health(*names)
        results = {r["name"]: r for r in json.loads(output)["results"]}
        worst = {result["status"] for result in results.values()} - {"ok"}
        assert code == (2 if "critical" in worst else 1 if worst else 0)
        printed.append([(results[name]["status"], results[name]["text"]) for name in ("disks_full", "read_only")])
    assert str(disk) not in printed[0][0][1] or printed[0][0][0] == "ok"
    assert printed[1][0][0] in ("warning", "critical")
    assert f"{disk}: 94% of its space used" in printed[1][0][1]
    assert printed[2][0][0] == "critical"
    assert f"{disk}: 100% of its space used" in printed[2][0][1]
    assert (
        f"{disk}: 96% of its inodes used" in printed[3][0][1] or f"{disk}: 97% of its inodes used" in printed[3][0][1]
    )
    assert printed[4][1] == ("critical", f"{disk} cannot be written: {disk} is read-only")
    assert [each[1][0] for each in printed[:4]] == ["ok"] * 4


def test_a_stuck_task(tmp_path: Path) -> None:
    """Threads of root's read a file system that root has mounted, and that does not answer."""
    needs_mounts()
    result = test_stuck_tasks.beside(tmp_path, test_stuck_tasks.build(tmp_path), "read", user=0, mount_of=0)
    assert (result.status, "stuck_tasks (" in result.text) == ("critical", True), result
    assert result.hint
    assert "stuck_tasks" not in CHECKS["stuck"].load()(Look(test_stuck_tasks.LIMITS)).text


WELL = {"smart_status": {"passed": True}}
LOG = "nvme_smart_health_information_log"
SMART: dict[str, tuple[Any, str, str]] = {
    "good": ({**WELL, LOG: {"percentage_used": 3}}, "ok", "1 disks"),
    "fails": ({"smart_status": {"passed": False}}, "critical", "sda reports that it fails"),
    "worn": ({**WELL, LOG: {"percentage_used": 95}}, "warning", "95% of its life used"),
    "no spare": ({**WELL, LOG: {"available_spare": 5}}, "warning", "5% spare left"),
    "warns itself": ({**WELL, LOG: {"critical_warning": 4}}, "critical", "sda reports that it fails"),
    "refused": ({"smartctl": {"messages": [{"string": "Permission denied"}]}}, "unknown", "Permission denied"),
    "garbage": ("<html>", "unknown", "answered no JSON"),
}


@pytest.mark.parametrize("case", SMART)
def test_smart(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, status, text = SMART[case]
    program = tmp_path / "bin" / "smartctl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{answer if isinstance(answer, str) else json.dumps(answer)}\nE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    result = look(tmp_path, "smart", GOOD)
    assert (result.status, text in result.text) == (status, True), result


@pytest.mark.parametrize(
    "answer",
    [
        {"smartctl": {"messages": [{"string": "Device is in STANDBY mode, exit(2)"}]}},
        {"smartctl": {"messages": []}, "smart_support": {"available": False}},
    ],
)
def test_disks_that_sleep_or_have_no_smart(tmp_path: Path, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "smartctl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with pytest.raises(Absent, match="every disk sleeps, or has no SMART"):
        look(tmp_path, "smart", GOOD)


def test_smart_without_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argus.health.checks.smart.shutil.which", lambda *_, **__: None)
    with pytest.raises(Blind, match="smartctl is not installed"):
        look(tmp_path, "smart", GOOD)


def test_a_clock_that_is_off(tmp_path: Path) -> None:
    """adjtimex says so: another one is loaded before the C library's."""
    (tmp_path / "adjtimex.c").write_text(
        "#include <stdlib.h>\n#include <sys/timex.h>\nint adjtimex(struct timex *t)"
        ' { t->status = atoi(getenv("STATUS")); t->maxerror = atol(getenv("MAXERROR")); return 0; }'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "a.so", tmp_path / "adjtimex.c"], check=True)
    program = """
import sys
from pathlib import Path
from argus.health.check import Look
from argus.health.checks import clock
result = clock.check(Look({key: limit.default for key, limit in clock.LIMITS.items()}, Path(sys.argv[1])))
print(result.status, result.text)
"""
    node = Node(tmp_path)
    node.file(CLOCK, "hpet")
    status, output = node.check("clock")  # and the exit code is 2
    assert (status, "time is counted by hpet, which is slow" in output) == ("critical", True)
    node.file(CLOCK, "tsc")
    for status, error, output in (
        (1, 2000, "ok tsc, right to 2.00 ms"),
        (1, 300000, "warning may be wrong by 300 ms"),
        (1, 9000000, "critical may be wrong by 9.0 s"),
        (64, 0, "warning nothing keeps"),
    ):
        environment = {
            **os.environ,
            "LD_PRELOAD": str(tmp_path / "a.so"),
            "STATUS": str(status),
            "MAXERROR": str(error),
        }
        words = [sys.executable, "-c", program, str(tmp_path / "root")]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(output), done.stdout


def test_without_sources(tmp_path: Path) -> None:
    for name in ("pressure", "edac", "numa", "run_queue", "smart", "infiniband"):
        with pytest.raises(Absent):
            look(tmp_path, name, {"proc/x": ""})


ELSEWHERE = {
    "disks_full": "test_health_host.test_disks_that_are_full",
    "stuck": "test_health_host.test_a_stuck_task",
    "smart": "test_health_host.test_smart",
    "link": "test_health_network.test_links",
    "link_errors": "test_health_network.test_links_that_lose_packets_and_come_and_go",
    "pause": "test_health_network.test_pause_storms",
    "infiniband": "test_health_network.test_infiniband",
    "devlink": "test_health_network.test_devlink",
    "xid": "test_health_gpu.test_xids",
    "kernel_log": "test_health_gpu.test_the_kernel_log",
    "probe_disk": "test_health_probes.test_a_disk_that_takes_no_writes_is_critical",
    "probe_gpu": "test_health_probes.test_gpus_multiply",
}
"""Tests of checks against bad and good sources, beside ``BAD`` here and of GPUs."""
NO_THRESHOLD = {"probe_cpu", "probe_memory", "probe_loopback"}
"""What they measure, trends judge: test_health_history."""


def test_every_check_has_a_bad_and_a_good_source() -> None:
    tested = {name for name, *_ in BAD} | {name for name, *_ in test_health_gpu.BAD}
    assert {*tested, *ELSEWHERE, *NO_THRESHOLD} == set(CHECKS)
    for place in ELSEWHERE.values():
        file, _, function = place.partition(".")
        assert f"def {function}(" in (Path(__file__).parent / f"{file}.py").read_text(), place
