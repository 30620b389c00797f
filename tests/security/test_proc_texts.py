"""What a process puts into its files in /proc, its name above all, makes no line and no field of them."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import argus.live.roster as live_roster
from argus.capture import blocked
from argus.capture.process import targets
from argus.capture.process.targets import Target, identity_of, numbers_of, owned
from argus.capture.reader import reader
from argus.health.check import Look
from argus.health.checks import _mounts, _waits
from argus.live import choose
from argus.live.options import Options
from argus.model.errors import ArgusError
from argus.system import proc
from tests.security.mapping_process import AS_NOBODY, NOBODY
from tests.security.test_look_ups import OF_PROCESS, Finder
from tests.security.test_neighbours import Starting

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    b"\rUid: 0 1001", b"\rUid:", b"\rUid: 0 x", b"\x0bUid: 0 1", b"\x85", b"\rNSpid:\t1", b"\rTgid:\t1",
    b"\xff) Z (", b"\nUid:\t0 0 0 0",
)  # fmt: skip
_PROGRAM = """
import ctypes, mmap, os, sys
if len(sys.argv) > 2:
    fd = os.open(sys.argv[2], os.O_RDONLY)
    code = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)
print(flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def named(name: bytes, *files: Path) -> Iterator[int]:
    """The PID of a process of uid 65534 with that name, which maps a file as code."""
    command = [*AS_NOBODY, "/usr/bin/python3", "-I", "-S", "-c", _PROGRAM, name.hex(), *map(str, files)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_makes_nobody_another_s(name: bytes) -> None:
    with named(name) as pid:
        assert proc.user_of(pid) == NOBODY
        assert proc.owner_of(pid)[0] == NOBODY
        assert proc.masters_of(pid) in ((0, NOBODY, 0), (0, NOBODY))
        assert owned(identity_of(pid), pid).uid == NOBODY
        assert not targets.runs_as_another(targets.inspect(pid))
        assert set(numbers_of(pid)) == {pid}
        assert targets._thread_group(pid) == pid
        assert targets.start_ticks(pid)
        assert targets.parent_of(pid) > 0
        assert not _waits.is_node_s(f"/proc/{pid}")
        assert {reader._state(pid)[0], blocked._moment(Path(f"/proc/{pid}"))[0]} <= {"S", "R"}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"Uid:", b"Uid:\tx", b"Uid:\t1 2 3", b"Uid:\t1 -2 3 4", b"Uid:\t1 \xb2 3 4", b"xUid:\t1 2 3 4",
        b"Name:\tUid:\t1 2 3 4",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_not_known(text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    for file in ("status", "uid_map", "cgroup"):
        (tmp_path / "7" / file).write_bytes(text)
    assert proc.user_of(7) == -1
    assert proc.owner_of(7) == (-1, "")
    assert proc.masters_of(7) == (0,)


def test_of_lines_of_one_name_the_last_counts() -> None:
    assert proc.field_of(b"Name:\tx\nUid:\t1 2 3 4\nUid:\t5 6 7 8\n", b"Uid") == b"5 6 7 8"


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_all_begins_whatever_a_process_is_called(name: bytes, tmp_path: Path) -> None:
    from run import BUILD

    for above in reversed([tmp_path, *tmp_path.parents][:-2]):
        above.chmod(above.stat().st_mode | 0o011)
    library = tmp_path / "libcuda.so.1"
    shutil.copy(BUILD / "libcuda.so.1", library)
    with named(name, library) as pid:
        found = choose.find_targets(Options(all_gpu=True))
        assert {target.pid: target.identity.uid for target in found}[pid] == NOBODY
        for target in found:
            target.close()


def test_a_process_that_cannot_be_inspected_is_left_out_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    whole: Target = targets.inspect(os.getpid())

    def opened(pid: int, **_: object) -> Target:
        if pid == 2:
            raise ValueError("\x1b[2J")
        return whole

    monkeypatch.setattr(choose, "_choose", lambda options: [2, 1])
    monkeypatch.setattr(choose, "open_target", opened)
    assert choose.find_targets(Options(all_gpu=True), lines.append) == [whole]
    (line,) = lines
    assert line.startswith("process 2 cannot be inspected (ValueError: ")
    assert line.isprintable()
    monkeypatch.setattr(choose, "_choose", lambda options: [2])
    with pytest.raises(ArgusError, match="process 2 cannot be inspected"):
        choose.find_targets(Options(all_gpu=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_costs_no_other_its_ranks(name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Starting(monkeypatch)
    with named(name) as pid:
        callers = of.start(NOBODY, pid) | of.start(1000, 1 << 22)
        monkeypatch.setattr(live_roster, "owner_of", lambda one: (proc if one == pid else of).owner_of(one))
        monkeypatch.setattr(of, "owner_of", of.owners.__getitem__, raising=False)
        of.turn(callers)
        assert of.roster.by_pid.keys() == callers
        assert of.roster.by_pid[pid][0].owner[0] == NOBODY


@pytest.mark.parametrize("fails", ["owner_of", "inspect", "parent_of"])
def test_a_process_whose_look_fails_costs_no_other_its_ranks(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    of = Starting(monkeypatch)
    odd, other = 1 << 22, (1 << 22) + 1
    right = getattr(live_roster, fails)

    def failing(pid: int, **words: bool) -> object:
        if pid == odd:
            raise IndexError("list index out of range")
        return right(pid, **words) if fails != "parent_of" else 1

    monkeypatch.setattr(live_roster, fails, failing)
    if fails == "parent_of":  # it is asked only of those with a rank
        monkeypatch.setattr(of.roster, "_adopt", _asking(of.roster._adopt))
    callers = of.start(NOBODY, odd) | of.start(1000, other)
    for _ in range(3):
        of.turn(callers)
        of.roster._look_at_candidates(of.now, all_of_them=True)
        of.roster.adopt_cpu_ranks(of.now)
    assert other in of.roster.by_pid
    assert of.session.bulkheads.counters["processes_quarantined"] == 1 + (fails == "parent_of"), "not each turn anew"
    assert of.session.bulkheads.counters["turns_failed"] == (fails == "owner_of")


def _asking(adopt):  # type: ignore[no-untyped-def]
    def adopted(target: Target) -> object:
        live_roster.parent_of(target.pid)
        return adopt(target)

    return adopted


def test_a_rank_whose_owner_cannot_be_had_leaves_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Starting(monkeypatch)
    of.turn(of.start(1000, 1, 2))
    for pid in (1, 2):
        of.roster.by_pid[pid][1].state = "traced"

    def another(target: Target) -> bool:
        if target.pid == 2:
            raise ValueError("x")
        return False

    monkeypatch.setattr(live_roster, "runs_as_another", another)
    assert [of.roster._has_new_owner(pid) for pid in (1, 2)] == [False, True]


def test_a_mount_s_name_makes_no_line(tmp_path: Path) -> None:
    (tmp_path / "proc" / "1").mkdir(parents=True)
    lines = [
        b"1 0 8:1 / /x\ry\x0b\x1c\xc2\x85z rw - ext4 /dev/a\r1 ro", b"", b"2 0 8:1 /", b"3 0 8:1 / / rw",
        b"4 0 8:1 / /a rw - ext4", b"5 0 8:1 / /b ro - xfs  rw",
    ]  # fmt: skip
    (tmp_path / "proc" / "1" / "mountinfo").write_bytes(b"\n".join(lines) + b"\n")
    found = _mounts.mounts(Look({}, tmp_path))
    assert [(one.path, one.device, one.read_only) for one in found] == [
        ("/x\ry\x0b\x1c\x85z", "/dev/a\r1", True), ("/b", "", True),
    ]  # fmt: skip


# ---- how files of /proc are split


SPLITS = {"splitlines", "readlines", "read_text"}
"""What ends lines at more than LF. ``read_text`` makes LF of CR."""
OF_OTHERS = "of text that is none of /proc"
KERNEL_S = "of /proc or /sys, where no process has put a word"
ALLOWED = {
    "argus/capture/blocked.py _system_call": "numbers",
    "argus/capture/kernel": KERNEL_S,
    "argus/capture/prices.py _machine": KERNEL_S,
    "argus/capture/probes.py": OF_OTHERS,
    "argus/capture/process/demangle_child.py _limit": "numbers",
    "argus/capture/process/environment.py _limit": "limits of a cgroup: numbers",
    "argus/capture/process/host_cpu.py parse_stat": KERNEL_S,
    "argus/capture/process/threads.py": "schedstat: numbers; the kernel's command line",
    "argus/capture/reader/process.py limit": "numbers",
    "argus/capture/sampler.py": KERNEL_S,
    "argus/compare/observe/exposed.py histograms": OF_OTHERS,
    "argus/compare/observe/machine.py": KERNEL_S,
    "argus/compare/observe/records.py schemas": OF_OTHERS,
    "argus/compare/verdict.py schema": OF_OTHERS,
    "argus/cupti/arm.py": OF_OTHERS,
    "argus/cupti/inject.py refuse": KERNEL_S,
    "argus/cupti/layouts.py _asked": OF_OTHERS,
    "argus/diagnose": OF_OTHERS,
    "argus/export/tables.py write_table": OF_OTHERS,
    "argus/health/check.py numbers": KERNEL_S,
    "argus/health/checks/_nvml.py on_bus": KERNEL_S,
    "argus/health/checks/_waits.py frames": "wchan, stack: functions of the kernel",
    "argus/health/checks/disk_slow.py check": KERNEL_S,
    "argus/health/checks/pressure.py check": KERNEL_S,
    "argus/health/checks/read_only.py _fstab": OF_OTHERS,
    "argus/health/checks/run_queue.py check": KERNEL_S,
    "argus/health/checks/steal.py check": KERNEL_S,
    "argus/health/config.py builtin": OF_OTHERS,
    "argus/health/cron.py _systemctl": OF_OTHERS,
    "argus/health/isolate.py": OF_OTHERS,
    "argus/health/run.py _boot_id": KERNEL_S,
    "argus/health/run.py _overdue": OF_OTHERS,
    "argus/health/run.py kind_of": KERNEL_S,
    "argus/importers": OF_OTHERS,
    "argus/live/command.py _linked": OF_OTHERS,
    "argus/live/preflight.py _store_engine": OF_OTHERS,
    "argus/store": OF_OTHERS,
    "argus/system/descendants.py children": "numbers",
    "argus/system/limits.py frugal": "a number",
    "cli": OF_OTHERS,
}
"""What may do so: a folder, a file, or a function of it, and why."""


class Splits(Finder):
    """Finds calls that end lines at more than LF, and files of processes that are opened as text."""

    def visit_Call(self, node: ast.Call) -> None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method in SPLITS or (self._opens_text(node) and not any(word.arg == "newline" for word in node.keywords)):
            self.found.append((".".join(self._where), node.lineno))
        self.generic_visit(node)

    def _opens_text(self, node: ast.Call) -> bool:
        match node.func:
            case ast.Name(id="open"):
                path, modes = (node.args or [ast.Constant("?")])[0], node.args[1:2]
            case ast.Attribute(attr="open", value=path) if ast.unparse(path) not in ("os", "io"):
                modes = node.args[:1]
            case _:
                return False
        modes = [*modes, *(word.value for word in node.keywords if word.arg == "mode")]
        shape = self._shape(path)
        last = shape.rpartition("/")[2]
        of_process = shape.startswith("/proc") or (
            "/" in shape and last in {*OF_PROCESS.split("|"), "wchan", "stack", "*"}
        )
        return of_process and not any("b" in ast.unparse(mode) or "w" in ast.unparse(mode) for mode in modes)


def test_files_of_proc_are_split_at_lf_alone() -> None:
    """Whoever adds such a call finds it here: ``argus.system.proc`` has ``lines_of`` and ``field_of``."""
    found, needed = [], set()
    for path in sorted(path for top in ("argus", "cli") for path in (ROOT / top).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for function, line in Splits(ast.parse(path.read_text())).found:
            reasons = ALLOWED.keys() & {name, f"{name} {function}", *map(str, Path(name).parents)}
            needed |= reasons
            if not reasons:
                found.append(f"{name}:{line} {function}")
    assert found == []
    assert sorted(ALLOWED.keys() - needed) == [], "a reason for what is not there"


@pytest.mark.parametrize(
    "text",
    [
        "read_file(f'/proc/{pid}/status').splitlines()",
        "(PROC / str(pid) / 'status').read_text()",
        "file.readlines()",
        "with open(f'{PROC}/{pid}/status') as file: ...",
        "with open(f'{task}/status', errors='replace') as file: ...",
        "with open('/proc/self/maps', 'r') as file: ...",
        "with Path('/proc/self/maps').open() as file: ...",
    ],
)
def test_a_split_at_more_than_lf_is_found(text: str) -> None:
    assert len(Splits(ast.parse(text)).found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "lines_of(read_file(f'/proc/{pid}/status'))",
        "text.split('\\n')",
        "with open(f'{PROC}/{pid}/status', 'rb') as file: ...",
        "with open(f'{PROC}/{pid}/status', newline='\\n') as file: ...",
        "os.open(f'/proc/{pid}/status', os.O_RDONLY)",
        "open(path)",
    ],
)
def test_a_split_at_lf_is_none_of_them(text: str) -> None:
    assert Splits(ast.parse(text)).found == []
