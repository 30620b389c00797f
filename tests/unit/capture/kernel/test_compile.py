"""Compiled programs that are kept: used when they are just what would be compiled, and only when they can be
believed."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from argus.capture import probes, sampler
from argus.capture.kernel import bcc, compile, programs
from argus.capture.kernel.programs import INSTRUCTION, LOG_STATISTICS, RAW_TRACEPOINT, LoadError, Module
from argus.capture.sampler import StackProbes
from argus.model.errors import ArgusError
from argus.system import disk_cache
from argus.system.syscalls import bpf as bpf_call

SOURCE = """
BPF_HASH(numbers, u64, u32, 64);
BPF_ARRAY(one, u64, 1);
BPF_PERCPU_ARRAY(each, u64, 2);
BPF_HASH(a_map_whose_name_is_longer_than_the_kernel_takes, u32, u32, 8);
int good(void *ctx)
{
    u64 key = 7;
    u32 value = 8;
    numbers.update(&key, &value);
    int zero = 0;
    u64 *counted = each.lookup(&zero);
    if (counted)
        *counted += 1;
    return 0;
}
int bad(void *ctx)
{
    u64 key = 7;
    u32 *value = numbers.lookup(&key);
    return *value;
}
"""
FLAGS = ["-D__BPF__"]
_BPF_PROG_TEST_RUN = 10


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bpf"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a compiler was asked for: it answers without LLVM."""
    asked: list[str] = []

    def answer(text: str, flags: list[str]) -> dict[str, object]:
        asked.append(text)
        spec = {"name": "m", "kind": 1, "key_bytes": 4, "value_bytes": 8, "entries": 16, "flags": 0}
        return {"maps": [spec], "programs": {"p": "AQIDBA=="}, "license": "GPL", "seconds": 2.0}

    monkeypatch.setattr(compile, "_ask_child", answer)
    return asked


def test_the_second_time_nothing_is_compiled(cache: Path, asked: list[str]) -> None:
    first = compile.compiled("text", ["-DA"])
    second = compile.compiled("text", ["-DA"])
    assert asked == ["text"]
    assert first.seconds == 2.0
    assert second.seconds == 0.0
    assert second.maps == first.maps == (compile.MapSpec("m", 1, 4, 8, 16, 0),)
    assert second.programs == first.programs == {"p": b"\1\2\3\4"}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_anything_else_is_compiled_anew(cache: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: monkeypatch.setenv("ARCH", "arm64"),
        lambda: monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "n", "9.9", "#1", "x86_64"))),
        lambda: monkeypatch.setattr(compile, "_headers", list),
        lambda: monkeypatch.setattr(compile, "_shared_libraries", lambda: [Path("/bin/sh")]),
        lambda: monkeypatch.setattr(bcc, "find", lambda: None),
        lambda: monkeypatch.setattr(compile, "FORMAT", 2),
    ]
    for change in changes:
        change()
        compile.compiled("text", ["-DA"])
        compile.compiled("text", ["-DA"])
    compile.compiled("text", ["-D", "A"])
    compile.compiled("text2", ["-D", "A"])
    assert len(asked) == len(changes) + 2


def test_what_others_could_have_written_is_not_believed(cache: Path, asked: list[str]) -> None:
    compile.compiled("text", [])
    (file,) = cache.glob("*.json")
    whole = file.read_bytes()
    times = 1

    def distrusted() -> bool:
        nonlocal times
        compile.compiled("text", [])
        compiled_again = len(asked) == times + 1
        times = len(asked)
        return compiled_again

    assert not distrusted()
    for part in (whole[:-1], whole.replace(b"AQIDBA", b"AQIDBB"), b"", whole[:64]):
        file.write_bytes(part)
        assert distrusted()
        assert file.read_bytes() == whole, "and kept again"
    file.chmod(0o620)
    assert distrusted()
    cache.chmod(0o777)
    assert distrusted()
    cache.chmod(0o700)
    file.rename(cache / "other")
    file.symlink_to(cache / "other")
    assert distrusted()
    assert not distrusted()
    if os.geteuid() == 0:
        os.chown(file, 65534, -1)
        assert distrusted()


def test_the_newest_are_kept(cache: Path, asked: list[str]) -> None:
    for number in range(compile.KEPT + 3):
        compile.compiled(str(number), [])
        compile.compiled("0", [])  # in use
    assert len(list(cache.iterdir())) == compile.KEPT
    for name, age_s in ((".new-killed", 7200), (".new-writes", 0)):
        (cache / name).touch()
        os.utime(cache / name, ((cache / name).stat().st_mtime - age_s,) * 2)
    compile.compiled("another", [])
    assert {path.name for path in cache.glob(".new-*")} == {".new-writes"}
    assert asked.count("0") == 1


@pytest.mark.parametrize("what", ["off", "a file"])
def test_without_a_place_it_is_compiled_each_time(
    what: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ARGUS_CACHE_DIR", "off" if what == "off" else str(tmp_path / "file"))
    assert compile.compiled("text", []).programs == {"p": b"\1\2\3\4"}
    assert compile.compiled("text", []).programs == {"p": b"\1\2\3\4"}
    assert len(asked) == 2


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARGUS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert disk_cache.folder("bpf") == Path("/var/cache/argus/bpf")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert disk_cache.folder("bpf") == Path("/elsewhere/argus/bpf")


@pytest.mark.kernel
def test_what_was_kept_runs_in_the_kernel(cache: Path) -> None:
    compile.compiled(SOURCE, FLAGS)
    kept = compile.compiled(SOURCE, FLAGS)
    assert kept.seconds == 0.0
    module = Module(kept)
    try:
        assert module["numbers"].spec == compile.MapSpec("numbers", 1, 8, 4, 64, 0)
        fd = module.load("good", RAW_TRACEPOINT)
        assert module.load("good", RAW_TRACEPOINT) == fd
        # The maps that it writes are those that it was loaded with.
        bpf_call(_BPF_PROG_TEST_RUN, struct.pack("<II", fd, 0) + bytes(72))
        assert module["numbers"].get(7) == (8).to_bytes(4, sys.byteorder)
        assert module["each"].total(0) == 1
        assert module["each"].total(1) == 0
        with pytest.raises(LoadError) as refusal:
            module.load("bad", RAW_TRACEPOINT)
        assert "map_value_or_null" in refusal.value.log
        assert "bad" not in module.programs
        assert re.search(r"processed \d+ insns", module.verifier_log("good", RAW_TRACEPOINT, level=LOG_STATISTICS))
    finally:
        module.close()


_CALL = 0x85
_NEWEST_HELPER = 175
"""bpf_task_pt_regs, the last one of Linux 5.15 (include/uapi/linux/bpf.h there)."""
_NEWEST_MAP = 27
"""BPF_MAP_TYPE_RINGBUF; later ones came with 5.16."""


@pytest.mark.kernel
@pytest.mark.thorough
def test_the_oldest_kernel_has_every_helper_and_kind_of_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/kernels asks the verifiers of other kernels."""
    seen: list[compile.Compiled] = []

    class Watched(Module):
        def __init__(self, compiled: compile.Compiled) -> None:
            super().__init__(compiled)
            seen.append(compiled)

    monkeypatch.setattr(probes, "Module", Watched)
    probes.Probes(launch_ring_bytes=1 << 20).close()
    StackProbes(rate_hz=19).close()
    assert [made.programs.keys() for made in seen] == [probes.PROGRAMS.keys(), sampler.PROGRAMS.keys()]
    assert max(spec.kind for made in seen for spec in made.maps) <= _NEWEST_MAP
    for made in seen:
        for name, code in made.programs.items():
            words = np.frombuffer(code, INSTRUCTION)
            helpers = words["value"][(words["code"] == _CALL) & (words["registers"] == 0)]
            assert set(helpers.tolist()) <= set(range(1, _NEWEST_HELPER + 1)), name


@pytest.mark.kernel
@pytest.mark.parametrize(("times", "loads"), [(3, True), (1000, False)])
def test_a_verifier_that_signals_interrupt_is_asked_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, times: int, loads: bool
) -> None:
    asked = 0

    def interrupted(command: int, attributes: bytes) -> int:
        nonlocal asked
        asked += 1
        if asked <= times:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return bpf_call(command, attributes)

    module = Module(compile.compiled(SOURCE, FLAGS))
    monkeypatch.setattr(programs, "bpf", interrupted)
    try:
        if loads:
            assert module.load("good", RAW_TRACEPOINT) >= 0
        else:
            with pytest.raises(LoadError, match="program good: Resource temporarily unavailable"):
                module.load("good", RAW_TRACEPOINT)
    finally:
        module.close()


@pytest.mark.kernel
def test_maps_are_read_and_written(cache: Path) -> None:
    module = Module(compile.compiled(SOURCE, FLAGS))
    try:
        table = module["numbers"]
        assert table.get(1) is None
        assert not table.delete(1)
        table.set(1, 10)
        table.set((2).to_bytes(8, sys.byteorder), b"\x14\0\0\0")
        assert table.get(1) == b"\x0a\0\0\0"
        assert table.update(np.arange(3, 6, dtype="<u8"), np.arange(30, 60, 10, dtype="<u4")) == 3
        keys, values = table.read()
        assert dict(zip(keys.view("<u8")[:, 0].tolist(), values.view("<u4")[:, 0].tolist(), strict=True)) == {
            1: 10, 2: 20, 3: 30, 4: 40, 5: 50,
        }  # fmt: skip
        assert table.delete(3)
        assert len(table.read(delete=True)[0]) == 4
        assert len(table.read()[0]) == 0
        # Room for 64: as many are reported to have found some.
        assert table.update(np.arange(100, dtype="<u8"), np.zeros(100, "<u4")) == 64
        with pytest.raises(OSError, match="too long"):
            table.set(1000, 1)
        with pytest.raises(ValueError, match="a key has 8 bytes, not 4"):
            table.get(b"1234")
        with pytest.raises(ValueError, match="a value has 4 bytes, not 8"):
            table.set(1, bytes(8))
        module["one"].set(0, 1 << 40)
        assert module["one"].get(0) == (1 << 40).to_bytes(8, sys.byteorder)
        module["a_map_whose_name_is_longer_than_the_kernel_takes"].set(1, 1)
    finally:
        module.close()
    before = set(os.listdir("/proc/self/fd"))
    Module(compile.compiled(SOURCE, FLAGS)).close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.kernel
def test_messages_of_clang_reach_the_user(cache: Path) -> None:
    with pytest.raises(ArgusError, match=r"cannot do it: .*error: use of undeclared identifier 'nothing'"):
        probes.module("int program(void *ctx) { return nothing; }", FLAGS, "do it")
    assert not cache.exists()


@pytest.mark.kernel
def test_modules_of_the_folder_it_is_called_in_are_not_imported(cache: Path, tmp_path: Path) -> None:
    """Argus runs as root wherever its user is."""
    (tmp_path / "argus").mkdir()
    for module in ("argus/__init__.py", "json.py", "base64.py"):
        (tmp_path / module).write_text("raise SystemExit('taken over')\n")
    code = (
        f"import os; os.chdir({str(tmp_path)!r})\n"
        "from argus.capture.kernel import compile\n"
        f"print(sorted(compile.compiled({SOURCE!r}, {FLAGS!r}).programs))\n"
    )
    # -I: this one does not look there either.
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['bad', 'good']\n", done.stderr


def test_without_bcc_the_reason_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcc, "find", lambda: None)
    with pytest.raises(ArgusError, match="bcc, which compiles eBPF programs, is not installed"):
        compile.compiled(SOURCE, FLAGS)


def test_the_verifier_s_objection_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    log = "0: R1=ctx()\nR0 invalid mem access 'map_value_or_null'\nprocessed 5 insns (limit 1000000) max_states 0\n"
    failure = probes.load_failure("load the BPF programs", log, LoadError(13, "program x: Permission denied"))
    assert failure.message == "cannot load the BPF programs: R0 invalid mem access 'map_value_or_null'"
    failure = probes.load_failure("load the BPF programs", "processed 5 insns\n", OSError(12, "Cannot allocate memory"))
    assert failure.message.endswith("Cannot allocate memory")
    for code in (errno.EPERM, errno.EACCES):
        failure = probes.load_failure("load the BPF programs", "", LoadError(code, os.strerror(code)))
        assert failure.message == "no permission to load the BPF programs"
