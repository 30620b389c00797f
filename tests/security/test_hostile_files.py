"""What files of traced processes can claim: each has a bound, and none is waited for."""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.process import c_library, cupti, elf, mapped, symbols, targets
from argus.capture.process.elf import Elf, FunctionTable, NotElf
from argus.capture.process.instructions import Code
from argus.capture.process.mapped import Allowance, open_file
from argus.capture.process.symbols import Symbols
from argus.capture.process.targets import find_libraries
from argus.capture.python import interpreter
from argus.capture.reader import reader as readers
from argus.capture.reader import wire
from argus.model import calls
from tests.security.mapping_process import mapping, mapping_of, needs_root
from tests.security.test_files import NO_DRIVER
from tests.security.test_off_the_loop import users

ROOT = Path(__file__).resolve().parents[2]


def compiled(path: Path, source: str, *flags: str) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *flags]
    subprocess.run(command, input=source.encode(), check=True)
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def unopened(path: Path) -> Iterator[None]:
    """Fails if any process opens a file, for however short a time: that ends a lease on it. A look at what it is
    (O_PATH, ``stat``) does not count."""
    fd = os.open(path, os.O_RDWR)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
        assert fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK, f"{path} was opened"
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


# ---- beside a mapped file


@needs_root()
@pytest.mark.parametrize("kind", ["pipe", "endless", "device", "large", "link"])
def test_the_version_beside_pytorch_is_read_only_if_it_is_a_small_file(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe was waited for; /dev/zero was read until there was no memory; a device was opened."""
    library = folder / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    compiled(library, f"int {calls.symbols_of('backward_begin')[0]}(void) {{ return 1; }}")
    version = library.parent.parent / "version.py"
    line = "__version__ = '2.13.0'\n"
    if kind == "pipe":
        os.mkfifo(version)
    elif kind == "endless":
        version.symlink_to("/dev/zero")
    elif kind == "device":
        os.mknod(version, 0o644 | stat.S_IFCHR, NO_DRIVER)
    elif kind == "large":
        version.write_text(line + " " * (8 << 20))
    else:
        (version.parent / "real.py").write_text(line)
        version.symlink_to("real.py")
    most = 0
    refusals: list[OSError] = []
    read, open_file_of = mapped.File.read, mapped.FileTree.file

    def look(self: mapped.FileTree, path: str) -> mapped.File:
        try:
            return open_file_of(self, path)
        except OSError as refusal:
            refusals.append(refusal)
            raise

    def note(self: mapped.File, size: int, offset: int) -> bytes:
        nonlocal most
        if os.path.samefile(self.path, version):
            most = max(most, size)
        return read(self, size, offset)

    monkeypatch.setattr(mapped.File, "read", note)
    monkeypatch.setattr(mapped.FileTree, "file", look)
    with mapping([library]) as pid:
        (found,) = (one for one in find_libraries(pid) if one.path == str(library))
    assert (found.layout is not None) == (kind in ("large", "link"))
    assert most <= 64 << 10
    # Who opens a device without a driver gets ENXIO.
    assert [type(refusal) for refusal in refusals] == ([] if kind in ("large", "link") else [mapped.Irregular])


_HIDDEN = (
    "static __attribute__((noinline)) int hidden(int n) { return n * 7 + %d; } int shown(int n) { return hidden(n); }"
)


@needs_root()
@pytest.mark.skipif(shutil.which("objcopy") is None or shutil.which("unshare") is None, reason="needs both")
def test_a_debug_file_is_not_looked_for_outside_the_root_of_the_process(folder: Path) -> None:
    """The name was the target's, the folder its path: any file of the host was opened. To open it and refuse it then
    is too late, and so is that of the library's own name."""
    library = compiled(folder / "evil.so", _HIDDEN % 3, "-O1", "-Wl,--build-id=none")
    subprocess.run(["objcopy", "--only-keep-debug", library, folder / "probe"], check=True)
    hidden = next(s for s in FunctionTable(library)._start.tolist() if FunctionTable(library).find(s) is not None)
    subprocess.run(["strip", library], check=True)
    subprocess.run(["objcopy", f"--add-gnu-debuglink={folder / 'probe'}", library], check=True)
    assert FunctionTable(library, str(library), "/").debug_file == str(folder / "probe")
    assert FunctionTable(library, str(library), str(folder / "none"), "/").debug_file == ""
    with pytest.raises(AssertionError, match="was opened"), unopened(folder / "probe"):
        FunctionTable(library, str(library), "/")
    there = f"cp {library} /dev/shm/argus-evil.$$ && mount -t tmpfs none {folder} && "
    there += f'mv /dev/shm/argus-evil.$$ {folder}/evil.so && exec "$@"'
    before = ["unshare", "--user", "--map-root-user", "--mount", "--propagation=private", "sh", "-c", there, "sh"]
    if subprocess.run([*before[:5], "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces can be made here")
    with mapping([folder / "evil.so"], before) as pid:
        where = mapping_of(pid, "evil.so")
        names = Symbols(pid)
        address = np.array([where.start + hidden - where.offset], np.uint64)
        with unopened(folder / "probe"), unopened(library):
            frame = names.name(address)[0]
        assert frame.module == str(folder / "evil.so")
        assert "hidden" not in frame.function
        names.close()


# ---- claims of ELF files


def _header(sections: list[tuple[int, int, int, int, int]], phdrs: bytes = b"") -> bytes:
    """An ELF file: sections as (type, offset, size, link, name)."""
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, size, link, 0, 1, 24)
                     for kind, at, size, link, name in sections)  # fmt: skip
    at = 64 + len(phdrs)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, at, 0, 64, 56,
                                                           len(phdrs) // 56, 64, len(sections), 0)  # fmt: skip
    return head + phdrs + table


@pytest.mark.parametrize("kind", [2, 3, 11])
def test_a_section_is_not_believed_to_be_larger_than_the_file_takes_on_disk(tmp_path: Path, kind: int) -> None:
    """4 KB on disk: 3 GB were read."""
    file = tmp_path / "sparse.so"
    size = 400 << 20
    file.write_bytes(_header([(3, 4096, 64, 0, 0), (kind, 8192, size, 2, 0), (3, 8192, size, 0, 0)]))
    os.truncate(file, 1 << 33)
    if kind == 3:
        assert Elf(file).functions(["main"]) == {}  # nothing reads it
        return
    for reader in (Elf, FunctionTable):
        with pytest.raises(NotElf, match="claims"):
            reader(file)


def test_a_file_has_one_table_of_symbols_of_each_kind(tmp_path: Path) -> None:
    """60,000 headers may all mean the same 100 MB."""
    file = tmp_path / "many.so"
    strings = 1000
    tables = [(2, 70_000, 2400, strings, 0)] * strings
    file.write_bytes(_header([*tables, (3, 70_000, 64, 0, 0)]).ljust(80_000, b"\1"))
    headers = elf._Headers(elf._File(file), "many")
    assert headers.symbol_tables() == [(0, 2)]
    assert len(Elf(file)._tables) == 1


def test_no_more_symbols_and_segments_are_read_than_any_library_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled(tmp_path / "some.so", "int one(void) { return 1; }")
    monkeypatch.setattr(elf, "_MOST_SYMBOLS", 2)
    with pytest.raises(NotElf, match="symbols"):
        Elf(library)
    monkeypatch.undo()
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 4096, 4096, 4096) * 300
    (tmp_path / "segments.so").write_bytes(_header([(3, 0, 64, 0, 0)], segments).ljust(80_000, b"\0"))
    for reader in (Elf, FunctionTable):
        with pytest.raises(NotElf, match="segments"):
            reader(tmp_path / "segments.so")
    monkeypatch.setattr(elf, "_MOST_BYTES_IN_ALL", 300)
    with pytest.raises(NotElf, match="claims"):
        Elf(library)


@pytest.mark.skipif(shutil.which("objcopy") is None, reason="needs objcopy")
def test_a_compressed_table_is_not_unpacked_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """625 KB became 4.1 GB."""
    made: list[int] = []
    real = elf._columns
    monkeypatch.setattr(elf, "_columns", lambda h: [made.append(len(h.image)), real(h)][1])
    for number, (size, check) in enumerate(((8 << 20, True), (80 << 20, False))):
        packed = tmp_path / f"{number}.xz"
        image = (_header([(3, 0, 64, 0, 0)]) + bytes(4096)).ljust(size, b"\0")
        packed.write_bytes(lzma.compress(image, preset=0))
        library = compiled(tmp_path / f"{number}.so", "int one(void) { return 1; }")
        subprocess.run(["strip", library], check=True)
        subprocess.run(["objcopy", f"--add-section=.gnu_debugdata={packed}", library], check=True)
        made.clear()
        FunctionTable(library)
        assert (size in made) == check
    # A dictionary of a gigabyte asks for that much memory.
    with pytest.raises(lzma.LZMAError):
        elf._decompressed(lzma.compress(b"x", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]))


@pytest.mark.parametrize("name", [0, 30, 31, 4_000_000_000])
def test_a_name_without_an_end_is_no_error(tmp_path: Path, name: int) -> None:
    strings = b"\0" + b"n" * 31
    symbol = struct.pack("<IBBHQQ", name, 2, 0, 1, 0x1000, 16)
    file = tmp_path / "unended.so"
    header = _header([(3, 4096, 32, 0, 0), (2, 4200, 24, 2, 0), (3, 4096, 32, 0, 0)])
    file.write_bytes(header.ljust(4096, b"\0") + strings + bytes(72) + symbol)
    expected = strings[name:].partition(b"\0")[0].decode()
    assert Elf(file).symbol_at(0x1008) == expected
    for address in (-1, 1 << 64, 1 << 70):
        assert Elf(file).symbol_at(address) is None


def test_a_function_is_probed_in_code_only(tmp_path: Path) -> None:
    """A symbol that claims to be a function may point anywhere in its file."""
    source = (
        '__asm__(".data\\n.globl in_data\\n.type in_data,@function\\nin_data: .quad 1\\n.size in_data, 8\\n.text");'
    )
    library = compiled(tmp_path / "data.so", source + "int in_code(void) { return 1; }")
    assert Elf(library).functions(["in_data", "in_code"]).keys() == {"in_code"}
    assert Elf(library).symbols(["in_data"]).keys() == {"in_data"}


def test_nested_functions_are_passed_over_in_bounded_time(tmp_path: Path) -> None:
    count = 3 * elf._MOST_NESTED
    symbols_ = np.zeros(count + 1, elf.SYMBOL)
    symbols_["info"], symbols_["section"], symbols_["name"] = 2, 1, 1
    symbols_["value"], symbols_["size"] = np.arange(count + 1) * 16 + 0x1000, 8
    symbols_["size"][0] = 1 << 30
    raw = symbols_.tobytes()
    file = tmp_path / "nested.so"
    body = 8192 + len(raw)
    sections = [(3, body, 16, 0, 0), (2, 8192, len(raw), 2, 0), (3, body, 16, 0, 0)]
    file.write_bytes(_header(sections).ljust(8192, b"\0") + raw + b"\0name\0".ljust(64, b"\0"))
    table = FunctionTable(file)
    table._end[0] = 1 << 40
    table._reach = np.maximum.accumulate(table._end)
    assert table.find(0x1000 + 16 * 10 + 12) == 0
    assert table.find(0x1000 + 16 * count + 12) is None


# ---- files that change while they are read


def _survives(program: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


def test_a_file_that_is_cut_short_ends_nobody(tmp_path: Path) -> None:
    """A memory map of it ended Argus with SIGBUS."""
    file = tmp_path / "cut.so"
    shutil.copy(compiled(tmp_path / "whole.so", "int one(void) { return 1; }"), file)
    _survives(
        "import os, sys\n"
        "from argus.capture.process.elf import Elf, FunctionTable, SymbolFile, NotElf\n"
        "from argus.capture.process.instructions import Code\n"
        "from argus.capture.process.mapped import open_file\n"
        "file = open_file(sys.argv[1])\n"
        "code, headers = Code(file), SymbolFile(file)\n"
        "assert len(code.at(4096)) == 15\n"
        "os.truncate(sys.argv[1], 70)\n"
        "assert code.at(4096) == b''\n"
        "assert headers.function('one', (1, 1)) is None\n"
        "for reader in (Elf, FunctionTable):\n"
        "    try: reader(file)\n"
        "    except NotElf: pass\n",
        str(file),
    )


@pytest.mark.parametrize("cut", ["below the headers", "once all is read"])
def test_a_file_that_is_cut_short_while_it_is_open_ends_nobody(tmp_path: Path, cut: str) -> None:
    """Its tables are gone that its headers promised, or the names that are read when they are asked for."""
    file = compiled(tmp_path / "cut.so", "int one(void) { return 1; }")
    _survives(
        "import os, sys\n"
        "from argus.capture.process import elf\n"
        "from argus.capture.process.mapped import open_file\n"
        "path, early = sys.argv[1], sys.argv[2] == 'below the headers'\n"
        "whole = open(path, 'rb').read()\n"
        "elf._STRINGS_IN_MEMORY = 0  # as if it were a large library\n"
        "tables, made = elf._Headers.symbol_tables, []\n"
        "def cut(headers):\n"
        "    os.truncate(path, 0)\n"
        "    return tables(headers)\n"
        "place, begin = elf.Elf(path).located(['one'])['one']\n"
        "if early: elf._Headers.symbol_tables = cut\n"
        "for reader in (elf.Elf, elf.FunctionTable, elf.SymbolFile):\n"
        "    open(path, 'wb').write(whole)\n"
        "    try: made.append(reader(open_file(path)))\n"
        "    except elf.NotElf: pass\n"
        "assert early or len(made) == 3\n"
        "os.truncate(path, 0)\n"
        "for one in made:\n"
        "    if isinstance(one, elf.Elf):\n"
        "        assert one.functions(['one']) in ({}, {'one': begin})\n"
        "        assert early or one.symbols(['one'])['one'].address\n"
        "        assert one.symbol_at(begin) in (None, 'one')\n"
        "    elif isinstance(one, elf.FunctionTable):\n"
        "        found = one.find(begin)\n"
        "        assert early == (found is None)\n"
        "        assert found is None or one.name(found) == ''\n"
        "    else:\n"
        "        assert one.function('one', place) is None\n",
        str(file),
        cut,
    )


def test_a_file_that_is_cut_and_written_meanwhile_ends_nobody(tmp_path: Path) -> None:
    whole = compiled(tmp_path / "whole.so", "int one(void) { return 1; }").read_bytes()
    file = tmp_path / "changing.so"
    file.write_bytes(whole)
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            os.truncate(file, 0)
            file.write_bytes(whole)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(300):
            for reader in (Elf, FunctionTable):
                try:
                    reader(file)
                except NotElf:
                    continue
            Code(open_file(file)).at(4096)
    finally:
        over.set()
        writer.join()


# ---- many files


@needs_root()
def test_new_files_of_a_process_are_read_a_few_at_a_time(folder: Path) -> None:
    """20,000 took 54 s, again and again."""
    program = compiled(folder / "0.so", "int ncclAllReduce(void) { return 1; }").read_bytes()
    for number in range(8):
        (folder / f"{number}.so").write_bytes(program + bytes([number]))
    (folder / "libnccl.so.2").write_bytes(program + b"last")
    paths = [folder / f"{number}.so" for number in range(8)]
    with mapping([*paths, folder / "libnccl.so.2"]) as pid:
        others = find_libraries(pid, Allowance(burst=0, per_second=0))
        assert others == []
        assert others.unread >= 9
        found = find_libraries(pid, Allowance(burst=1, per_second=0))
        assert [library.path for library in found] == [str(folder / "libnccl.so.2")]
        rest = find_libraries(pid, Allowance(burst=100, per_second=0))
        assert rest.unread == 0
        assert len(rest) == 9
        assert len(find_libraries(pid, Allowance(burst=0, per_second=0))) == 9, "what was read is remembered"


def test_an_allowance_is_each_process_s_own() -> None:
    allowance = Allowance(burst=2, per_second=0.5)
    assert [allowance.take(1, 100.0) for _ in range(3)] == [True, True, False]
    assert allowance.take(2, 100.0)
    assert not allowance.take(1, 101.0)
    assert allowance.take(1, 103.0)
    assert [allowance.take(1, 1e6) for _ in range(3)] == [True, True, False]


@needs_root()
def test_files_beyond_a_count_are_not_considered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MAX_FILES", 1)
    compiled(folder / "libnccl.so.2", "int ncclAllReduce(void) { return 2; }")
    with mapping([folder / "libnccl.so.2"]) as pid:
        found = find_libraries(pid)
    assert len(found) == 1
    assert found.unread > 1


# ---- the C library of a process, CUPTI's folders, CPython's variables


def _libc() -> Path:
    return next(Path(one.path) for one in targets.executable_mappings(os.getpid()) if "libc.so" in one.path)


@needs_root()
def test_a_c_library_is_searched_within_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping was read in whole: 64 GB of a file with holes."""
    evil = folder / "libc.so.6"
    shutil.copy(_libc(), evil)
    os.truncate(evil, 1 << 36)
    most = 0
    read = mapped.File.read

    def note(self: mapped.File, size: int, offset: int) -> bytes:
        nonlocal most
        most = max(most, size)
        return read(self, size, offset)

    with mapping([evil]) as pid:
        evil.unlink()
        os.mkfifo(evil)
        monkeypatch.setattr(mapped.File, "read", note)
        found = c_library.find_functions(pid)
    assert found is not None
    assert found.dlopen
    assert 0 < most <= 32 << 20


@needs_root()
def test_cupti_is_looked_for_in_bounded_folders_of_the_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupti, "_SYSTEM", ("usr/local/cuda*/lib64",))
    (tmp_path / "libcupti.so.13").touch()
    names = folder / "lib"
    names.mkdir()
    shutil.copy(compiled(folder / "x.so", "int x;"), names / "libcudart.so.13")
    with mapping([names / "libcudart.so.13"]) as pid:
        (names / "libcupti.so.13").touch()
        assert str(names / "libcupti.so.13") in cupti.candidates(pid)
        listed: list[tuple[str, int]] = []
        real = mapped.FileTree.names

        def note(self: mapped.FileTree, where: str, most: int) -> list[str]:
            listed.append((where, most))
            return real(self, where, most)

        monkeypatch.setattr(mapped.FileTree, "names", note)
        monkeypatch.setattr(cupti, "_MOST_IN_ALL", 5)
        monkeypatch.setattr(cupti, "_MOST_NAMES", 3)
        cupti.candidates(pid)
        assert max(most for _, most in listed) <= 3
        shutil.rmtree(names)
        names.symlink_to(f"/proc/self/root{tmp_path}")
        monkeypatch.undo()
        monkeypatch.setattr(cupti, "mapped_paths", lambda _: [str(names / "libcudart.so.13")])
        monkeypatch.setattr(cupti, "_SYSTEM", ())
        assert cupti.candidates(pid) == []


def test_variables_of_a_size_that_a_file_claims_are_not_read(tmp_path: Path) -> None:
    """2^47 bytes were asked for: MemoryError ended the trace."""
    asked: list[int] = []
    memory = SimpleNamespace(read=lambda at, size: asked.append(size))
    segment = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, 0, 1 << 47, 4096)
    small = struct.pack("<IIQQQQQQ", 1, 6, 0, 4096, 0, 0, 40 << 20, 4096)
    (tmp_path / "claims.so").write_bytes(_header([(3, 0, 64, 0, 0)], segment + small * 3).ljust(8192, b"\0"))
    binary: Any = SimpleNamespace(elf=Elf(tmp_path / "claims.so"))
    version, why = interpreter._version(memory, binary, 0, {"PyIter_Send": 1})  # type: ignore[arg-type]
    assert (version, why) == ((0, 0, 0), "it has not begun yet")
    assert asked == [40 << 20]


def test_a_binary_that_is_remembered_holds_no_tables(tmp_path: Path) -> None:
    library = compiled(tmp_path / "libpython3.so", "int Py_GetVersion(void) { return 1; }")
    binary = interpreter._read_binary(open_file(library), whole=True)
    assert binary is not None
    assert binary.has_interpreter
    assert binary.elf.nbytes == 0


# ---- perf maps


@pytest.fixture
def perf(tmp_path: Path) -> Iterator[tuple[Any, Path, dict[str, int]]]:
    (tmp_path / "tmp").mkdir()
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    proc = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    counters = dict.fromkeys(("perf_map_lines_rejected", "perf_map_bytes_unread"), 0)
    numbers = re.search(r"NSpid:.*?(\d+)\n", Path("/proc/self/status").read_text())
    assert numbers is not None
    yield symbols._PerfMap(proc, root, counters), tmp_path / "tmp" / f"perf-{numbers[1]}.map", counters
    os.close(root)
    os.close(proc)


def test_a_perf_map_is_read_in_parts_and_up_to_a_bound(
    perf: tuple[Any, Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """56 MB in 5 million lines took 6 s and 1.3 GB, at once."""
    reader, path, counters = perf
    monkeypatch.setattr(symbols, "_PERF_LINES_AT_ONCE", 100)
    monkeypatch.setattr(symbols, "_MAX_PERF_LINES", 250)
    now = 10**12
    monkeypatch.setattr(symbols, "time", SimpleNamespace(monotonic_ns=lambda: now))
    reader._left, reader._left_ns = 100, now
    path.write_text("".join(f"{0x1000 + 16 * n:x} 10 function {n}\n" for n in range(400)))
    assert reader.refresh()
    assert reader.find(0x1000 + 16 * 99) == ("function 99", 0x1000 + 16 * 99)
    assert reader.find(0x1000 + 16 * 100) is None
    assert not reader.refresh(), "the rest waits"
    for _ in range(4):
        now += 10**9
        reader.refresh()
    assert reader.find(0x1000 + 16 * 250) is not None
    assert reader.find(0x1000 + 16 * 399) is None
    assert counters["perf_map_bytes_unread"] > 0
    assert len(reader._parts) < 10


@pytest.mark.parametrize("much", ["lines", "names", "bytes"])
def test_the_bounds_of_a_perf_map_hold_as_shipped(
    perf: tuple[Any, Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch, much: str
) -> None:
    reader, path, counters = perf
    now = 10**12
    monkeypatch.setattr(symbols, "time", SimpleNamespace(monotonic_ns=lambda: now))
    reader._left_ns = now
    at_once = symbols._PERF_LINES_AT_ONCE if much == "lines" else symbols._PERF_BYTES_AT_ONCE
    if much == "lines":
        most = symbols._MAX_PERF_LINES
        path.write_text("".join(f"{16 * n:x} 10 f\n" for n in range(1, most + 2 * at_once)))
    elif much == "names":
        most = symbols._MAX_PERF_TEXT
        name = "n" * symbols._LONGEST_PERF_NAME
        path.write_text("".join(f"{16 * n:x} 10 {name}\n" for n in range(1, (most + 2 * at_once) // len(name))))
    else:
        most = symbols._MAX_PERF_MAP
        path.touch()
        os.truncate(path, most + 2 * at_once)
    while reader.refresh():
        now += 10**9
    kept = {
        "lines": sum(len(part.starts) for part in reader._parts),
        "names": sum(len(part.text) for part in reader._parts),
        "bytes": reader._at,
    }
    assert most <= kept[much] <= most + at_once
    assert counters["perf_map_bytes_unread"] > 0


def test_a_perf_map_behind_a_link_is_not_read(perf: tuple[Any, Path, dict[str, int]], tmp_path: Path) -> None:
    reader, path, _ = perf
    (tmp_path / "real").write_text("1000 10 planted\n")
    path.symlink_to(tmp_path / "real")
    assert not reader.refresh()
    path.unlink()
    os.mkfifo(path)
    assert not reader.refresh()
    path.unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / path.name).write_text("1000 10 planted\n")
    (tmp_path / "tmp").rmdir()
    (tmp_path / "tmp").symlink_to(tmp_path / "elsewhere")
    assert not reader.refresh(), "an absolute link leads nowhere outside the root"


# ---- bounds as shipped


def test_the_bounds_of_a_perf_map_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "trace.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("| perf_map_bytes_unread |"))
    names, whole = symbols._MAX_PERF_TEXT / (1 << 20), symbols._MAX_PERF_MAP / (1 << 20)
    shipped = (
        f"beyond the first {symbols._MAX_PERF_LINES:,} functions, {names:g} MiB of names and {whole:g} MiB in all; "
    )
    shipped += f"{symbols._PERF_LINES_AT_ONCE:,} lines are read a second"
    assert shipped in line


def test_the_bounds_of_a_reader_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("| a reader |"))
    shipped = f"a request: {wire.CPU_S:g} s of CPU; waits, not for a CPU: {readers.HUNG_S:g} s without any progress, "
    shipped += f"{readers.SLOW_S:g} s in all and ten times its CPU time, at most {readers.SLOWEST_S:g} s; "
    shipped += f"{readers.LONGEST_S:g} s on the clock. "
    shipped += f"{wire.MEMORY_BYTES / (1 << 30):g} GiB, {wire.MAX_BYTES / (1 << 20):g} MiB an answer"
    assert shipped in line
    assert readers.SLOW_PER_CPU == 10
    one = readers.Reader()
    assert (one._cpu_s, one._memory_bytes) == (wire.CPU_S, wire.MEMORY_BYTES)


# ---- one way


_MAPS = r"\bmmap\(|\bmmap\.(restype|argtypes)|from mmap import|\bmemmap\b|\bmemory_map|\bmmap_(mode|size)"
_MAPPED = {
    "argus/capture/kernel/counts.py": "a map of the kernel's",
    "argus/capture/kernel/ring.py": "a map of the kernel's",
    "argus/capture/prices.py": "a file in memory that it has made",
    "argus/capture/reader/process.py": "a page in memory that Argus has made for it",
    "argus/capture/reader/reader.py": "the same page",
    "argus/capture/sampler.py": "a map of the kernel's",
    "argus/cupti/shared.py": "the helper's memory: it is used only if it cannot become shorter (collector._sealed)",
    "argus/live/command.py": "files that are never read, in a process of the user's; and memory without a file",
    "argus/live/preflight.py": "a file in memory that it has made",
}
"""What maps memory, and why nobody ends Argus by cutting what lies there (SIGBUS). Files of processes are read."""


def test_no_file_of_a_process_is_mapped() -> None:
    assert users(_MAPS) == _MAPPED.keys()
    assert not any(name.startswith(("argus/capture/process/", "argus/capture/python/")) for name in _MAPPED)


@pytest.mark.parametrize(
    "line",
    [
        "mmap.mmap(file.fd, 0)",
        "self._map = mmap(file.fd, 0)",
        "address = libc.mmap(None, 4096, 1, 2, file.fd, 0)",
        "from mmap import mmap as mapped",
        "np.memmap(path)",
        "np.load(path, mmap_mode='r')",
        "pa.memory_map(path)",
        "pq.ParquetFile(path, memory_map=True)",
    ],
)
def test_what_maps_memory_is_found(line: str) -> None:
    assert re.search(_MAPS, line)


_LOOK_UPS = {
    r"/root\b.*\{|\}/root\b|/ \"root\"": {"argus/capture/process/mapped.py", "argus/capture/process/symbols.py"},
    r"map_files": {"argus/capture/process/mapped.py", "argus/capture/process/cupti.py"},
    r"\breachable\(|\bis_emulated\b|\bimport elftools|\bfrom elftools": set(),
    r"(open|open_file|stat|Elf|SymbolFile|FunctionTable)\(\w*(mapping|region|library)\.(path|open_path)": {
        "argus/live/preflight.py"
    },
}
"""What would look a file of a process up by its path, and where it may stand: cupti.py finds the helper's own
memory; symbols.py keeps a process's root folder; preflight.py opens a library of Argus's own process."""


def test_no_file_of_a_process_is_looked_up_a_second_time() -> None:
    found = []
    for path in sorted([*(ROOT / "argus").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition("#")[0]
            for pattern, allowed in _LOOK_UPS.items():
                if re.search(pattern, code) and name not in allowed and "``" not in code:
                    found.append(f"{name}:{number}: {line.strip()}")
    assert found == []
