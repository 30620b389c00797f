"""Names of native code against ground truth: what nm and objdump say of the files that real processes map."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.process import symbols
from argus.capture.process.elf import FunctionTable, NotElf
from argus.capture.process.symbols import FramePointers, NativeFrame, Symbols, readable
from argus.capture.process.targets import Mapping, executable_mappings

pytestmark = pytest.mark.core

x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="knows the call instructions of x86-64")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>
__attribute__((noinline)) static int hidden_sum(int n) {
    int s = 0;
    for (int i = 0; i < n; i++) s += i ^ s;
    return s;
}
__attribute__((noinline)) int shown_product(int n) {
    int s = 1;
    for (int i = 1; i < n; i++) s *= i + hidden_sum(i);
    return s;
}
int alias_that_is_longer(int) __attribute__((alias("shown_product")));
static int local(int) __attribute__((alias("shown_product"), used));
int main(void) {
    char line[4096], path[4096];
    void *library = NULL;
    printf("%p %p %lx\n", (void *)hidden_sum, (void *)shown_product, getauxval(AT_SYSINFO_EHDR));
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "open %s", path) == 1) {
            library = dlopen(path, RTLD_NOW);
            printf("%p\n", library ? dlsym(library, "reload_me") : NULL);
        } else if (!strncmp(line, "close", 5)) {
            printf("%d\n", dlclose(library));
        } else if (!strncmp(line, "jit", 3)) {
            printf("%p\n", mmap(NULL, 1 << 16, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        } else if (sscanf(line, "write %s", path) == 1) {
            FILE *file = fopen(path, "w");
            fputs(strchr(line, '=') + 1, file);
            printf("%d\n", fclose(file));
        }
        fflush(stdout);
    }
    return shown_product(3) == 12345;
}
"""


class Running:
    """A process that answers one line to each line."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.hello = self.process.stdout.readline().split()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Running] = []

    def begin(*command: str | Path) -> Running:
        running.append(Running([str(word) for word in command]))
        return running[-1]

    yield begin
    for process in running:
        process.end()


def compile_c(source: str, target: Path, *flags: str, compiler: str = "gcc") -> Path:
    language = "c++" if compiler == "g++" else "c"
    subprocess.run([compiler, "-x", language, "-", "-o", str(target), *flags], input=source, text=True, check=True)
    return target


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(PROGRAM, tmp_path_factory.mktemp("program") / "program", "-O1", "-ldl")


@cache
def debug_file(file: str) -> str:
    """The distribution's symbols of a stripped file, where they are installed (libc6-dbg)."""
    notes = subprocess.run(["readelf", "-nW", file], capture_output=True, text=True).stdout
    build_id = (notes.partition("Build ID: ")[2].split() or ["none"])[0]
    path = Path(f"/usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug")
    return str(path) if path.exists() else ""


@cache
def functions_of(file: str) -> list[tuple[int, int, str]]:
    """Address, end and name of every function that nm sees in a file."""
    found = []
    for options in (["-S", file], ["-S", "-D", file], *([["-S", debug]] if (debug := debug_file(file)) else [])):
        listing = subprocess.run(["nm", "--defined-only", *options], capture_output=True, text=True).stdout
        for line in listing.splitlines():
            words = line.split()
            if len(words) == 4 and words[2] in "tTwWi":
                start = int(words[0], 16)
                found.append((start, start + int(words[1], 16), words[3].partition("@")[0]))
    return found


@cache
def columns_of(file: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Begin and end of each of ``functions_of``."""
    starts, ends = np.array([row[:2] for row in functions_of(file)], np.int64).T
    return starts, ends


@cache
def segments_of(file: str) -> list[tuple[int, int, int]]:
    """File offset, virtual address and size in the file of each segment that is loaded, from readelf."""
    listing = subprocess.run(["readelf", "-lW", file], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines() if line.strip().startswith("LOAD")]
    return [(int(row[1], 16), int(row[2], 16), int(row[4], 16)) for row in rows]


def names_at(file: str, mapping: Mapping, address: int) -> set[str]:
    """Names of all functions that cover an address of a process, by nm."""
    offset = address - mapping.start + mapping.offset
    at = next((offset - o + virtual for o, virtual, size in segments_of(file) if o <= offset < o + size), -1)
    starts, ends = columns_of(file)
    return {readable(functions_of(file)[i][2]) for i in np.flatnonzero((starts <= at) & (at < ends)).tolist()}


def mapping_of(pid: int, name: str) -> Mapping:
    return next(mapping for mapping in executable_mappings(pid) if Path(mapping.path).name.startswith(name))


def address_in(pid: int, file: str, name: str, inside: int = 1) -> int:
    """Where a function's code lies in a process."""
    start = next(start for start, _, known in functions_of(file) if known == name)
    for mapping in executable_mappings(pid):
        if Path(mapping.path).name == Path(file).name:
            for offset, virtual, size in segments_of(file):
                at = start - virtual + offset - mapping.offset + mapping.start
                if virtual <= start < virtual + size and mapping.start <= at < mapping.end:
                    return at + inside
    raise AssertionError(f"{name} is not mapped")


def leaf(names: Symbols, address: int) -> NativeFrame:
    return names.name(np.array([address], np.uint64))[0]


def pythons() -> list[object]:
    """The distribution's interpreter, with all functions in the program, and pyenv's, which are often in libpython."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    newest = sorted((p for p in root.glob("3.*/bin/python3")), key=lambda p: int(p.parts[-3].split(".")[1]))
    found = [Path("/usr/bin/python3"), *newest[-1:]]
    return [
        pytest.param(path, marks=[] if path.exists() else pytest.mark.skip(reason=f"{path} is not installed"))
        for path in (found if newest else [*found, root / "3"])
    ]


def assert_same_as_nm(pid: int, *, count: int) -> None:
    """Random addresses of everything that is mapped: a half anywhere, a half inside functions that nm knows."""
    chosen = random.Random(7)
    names = Symbols(pid)
    named = unnamed = 0
    for mapping in executable_mappings(pid):
        file = mapping.path
        addresses = [chosen.randrange(mapping.start, mapping.end) for _ in range(count // 2)]
        for start, end, _ in chosen.choices(functions_of(file), k=count // 2):
            address = chosen.randrange(start, max(end, start + 1))
            for offset, virtual, size in segments_of(file):
                at = address - virtual + offset - mapping.offset + mapping.start
                if virtual <= address < virtual + size and mapping.start <= at < mapping.end:
                    addresses.append(at)
        for address in addresses:
            frame = leaf(names, address)
            truth = names_at(file, mapping, address)
            if frame.function in truth:
                named += 1
            elif not frame.function and not truth:
                unnamed += 1
            else:
                # nm prints no size of a function that has none (assembly of the C runtime), and knows nothing of the
                # parts that gcc moves out of functions, where these are no symbols.
                assert not truth, f"{address:#x} in {mapping.path}: {frame} is not {truth}"
                whole = frame.function.removesuffix(".cold")
                moved = {readable(name) for _, _, name in functions_of(file)} if whole != frame.function else set()
                known_to_nm = {readable(n) for n in unsized(file)} | moved
                assert whole in known_to_nm, f"{frame} is none that nm knows"
            assert frame.module == mapping.path
            # Without a name it is where the function begins, if unwind tables show that.
            known = names.function(address)
            place = address if frame.function or known is None else known[0]
            assert known is None or known[0] <= address < known[1]
            assert frame.offset == place - mapping.start + mapping.offset
    names.close()
    assert named > count
    assert unnamed > 0


@cache
def unsized(file: str) -> set[str]:
    listing = subprocess.run(["nm", "--defined-only", debug_file(file) or file], capture_output=True, text=True).stdout
    return {line.split()[2] for line in listing.splitlines()}


@pytest.mark.parametrize(
    "flags", [("-pie", "-fPIE"), ("-no-pie", "-fno-pie"), ("-pie", "-fPIE", "-Wl,-z,noseparate-code")]
)
def test_a_program_s_names_are_those_of_nm(tmp_path: Path, start: Start, flags: tuple[str, ...]) -> None:
    file = compile_c(PROGRAM, tmp_path / "program", "-O1", "-ldl", *flags)
    running = start(file)
    assert_same_as_nm(running.pid, count=120)
    names = Symbols(running.pid)
    static, shown = (int(text, 16) for text in running.hello[:2])
    assert leaf(names, static + 3).function == "hidden_sum"
    # The shortest of several names that are not local.
    assert leaf(names, shown + 3).function == "shown_product"
    notes = subprocess.run(["readelf", "-n", str(file)], capture_output=True, text=True, check=True).stdout
    assert leaf(names, static).build_id == notes.partition("Build ID: ")[2].split()[0]
    names.close()


@pytest.mark.parametrize("interpreter", pythons())
def test_an_interpreter_s_names_are_those_of_nm(start: Start, interpreter: Path) -> None:
    running = start(interpreter, "-Sc", "import _json, sys; print('ready', flush=True); sys.stdin.read()")
    assert_same_as_nm(running.pid, count=400)
    file = next(
        mapping.path
        for mapping in executable_mappings(running.pid)
        if any(name == "_PyEval_EvalFrameDefault" for _, _, name in functions_of(mapping.path))
    )
    names = Symbols(running.pid)
    assert names.interpreter_frame(address_in(running.pid, os.path.realpath(file), "_PyEval_EvalFrameDefault", 40))
    assert not names.interpreter_frame(address_in(running.pid, os.path.realpath(file), "PyObject_Repr", 40))
    names.close()


def test_a_return_address_behind_a_function_s_end_belongs_to_its_last_call(program: Path, start: Start) -> None:
    running = start(program)
    end = next(end - start for start, end, name in functions_of(str(program)) if name == "hidden_sum")
    names = Symbols(running.pid)
    behind = int(running.hello[0], 16) + end
    assert names.name(np.array([behind, behind], np.uint64))[1].function == "hidden_sum"
    assert leaf(names, behind).function != "hidden_sum"
    names.close()


def test_c_plus_plus_and_rust_are_shown_as_written(tmp_path: Path, start: Start) -> None:
    source = """
    #include <cstdio>
    namespace space { template <typename T> struct Widget { __attribute__((noinline)) T run(T n) { return n * 3; } }; }
    template struct space::Widget<int>;
    int main() { space::Widget<int> w; std::printf("%d ready\\n", w.run(2)); std::fflush(stdout); std::getchar(); }
    """
    file = compile_c(source, tmp_path / "widget", "-O1", compiler="g++")
    running = start(file)
    names = Symbols(running.pid)
    at = address_in(running.pid, str(file), "_ZN5space6WidgetIiE3runEi")
    assert leaf(names, at).function == "space::Widget<int>::run(int)"
    names.close()
    assert readable("_ZN3std2io5stdio6_print17h0123456789abcdefE") == "std::io::stdio::_print"
    assert readable("_ZN4main28_$u7b$$u7b$closure$u7d$$u7d$17h0123456789abcdefE") == "main::{{closure}}"
    assert readable("plain_c") == "plain_c"
    assert readable("_Z3fooiz") == "foo(int, ...)"


# From rustc 1.95's standard library, and the examples of RFC 2603; as c++filt shows them, without the crates' hashes.
RUST = {
    "_RNvMsr_NtCs3ssYzQotkvD_3std4pathNtB5_7PathBuf3newCs15kBYyAo9fc_7mycrate": "<std::path::PathBuf>::new",
    "_RNvCs15kBYyAo9fc_7mycrate7example": "mycrate::example",
    "_RNvXs0_NtNtCsgEmfK2I1SDS_4core3num7dec2fltC3f16NtNtNtB9_3str6traits7FromStr8from_str": (
        "<f16 as core::str::traits::FromStr>::from_str"
    ),
    "_RINvMs4_NtCsgY6Mt91CT9J_14rustc_demangle2v0NtB6_7Printer13print_backrefNCNvB2_10print_paths_0EB8_": (
        "<rustc_demangle::v0::Printer>::print_backref::<<rustc_demangle::v0::Printer>::print_path::{closure#1}>"
    ),
    "_RINvMs_NtCshg5UprtI8ZK_4jiff5errorNtB5_5Error5rangeINtNtNtB7_4util8rangeint4ri32Knn3b9ac9ff_Kn3b9ac9ff_EllEB7_": (
        "<jiff::error::Error>::range::<jiff::util::rangeint::ri32<-999999999, 999999999>, i32, i32>"
    ),
    "_RMC0INtC8arrayvec8ArrayVechKj7b_E": "<arrayvec::ArrayVec<u8, 123>>",
    "_RNqCs4fqI2P2rA04_11utf8_identsu30____7hkackfecea1cbdathfdh9hlq6y": "utf8_idents::საჭმელად_გემრიელი_სადილი",
    "_RIC0FG_RL0_hEuE": "::<for<'a> fn(&'a u8)>",
    "_RINvC1c1fDNtC1d1TEL_TuhERL_eE": "c::f::<dyn d::T, ((), u8), &str>",
}


@pytest.mark.parametrize("symbol", RUST)
def test_rust_s_new_mangling(symbol: str) -> None:
    assert readable(symbol) == RUST[symbol]
    assert readable(symbol + ".llvm.123") == RUST[symbol]
    for end in range(2, len(symbol)):
        assert readable(symbol[:end]) is not None  # whatever it is, nothing is raised
    assert readable("_R" + "B_" * 40) == "_R" + "B_" * 40
    assert readable("_RNvC1a1b!") == "_RNvC1a1b!"
    # Each doubles the one before.
    bomb = "_RINvC1a1bT" + "uu" + "E" + "".join(f"TB{'6_' if not n else '_'}B{'6_'}E" for n in range(40)) + "E"
    assert len(readable(bomb)) < 1 << 20


def test_a_stripped_file_is_named_by_offset_and_named_by_its_debug_file(
    program: Path, tmp_path: Path, start: Start
) -> None:
    stripped, debug = tmp_path / "stripped", tmp_path / "stripped.debug"
    shutil.copy(program, stripped)
    subprocess.run(["objcopy", "--only-keep-debug", program, debug], check=True)
    subprocess.run(["strip", stripped], check=True)
    running = start(stripped)
    static = int(running.hello[0], 16)
    names = Symbols(running.pid)
    frame = leaf(names, static + 2)
    assert frame.function == ""
    assert frame.text == f"stripped+{frame.offset:#x}"
    virtual, end = next((start, end) for start, end, name in functions_of(str(program)) if name == "hidden_sum")
    assert FunctionTable(program).virtual(frame.offset) == virtual
    assert leaf(names, static + end - virtual - 1) == frame, "one function, one place"
    assert leaf(names, static + end - virtual).offset != frame.offset
    assert names.function(static + 2) == (static, static + end - virtual)
    assert names.counters["native_addresses_unnamed"] == 3
    names.close()

    # By build id, below a root.
    build_id = frame.build_id
    place = tmp_path / f"root/usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
    place.parent.mkdir(parents=True)
    shutil.copy(debug, place)
    table = FunctionTable(stripped, str(stripped), str(tmp_path / "root"))
    assert table.debug_file == str(place)
    assert table.name(table.find(virtual + 2) or 0) == "hidden_sum"
    # One of another build is none of its.
    compile_c("int other(void) { return 1; }", place, "-shared")
    assert FunctionTable(stripped, str(stripped), str(tmp_path / "root")).debug_file == ""

    # By name, beside the file: the checksum decides where there is no build id.
    bare = tmp_path / "bare"
    shutil.copy(program, bare)
    subprocess.run(["objcopy", "--remove-section=.note.gnu.build-id", bare], check=True)
    subprocess.run(["objcopy", "--only-keep-debug", bare, tmp_path / "bare.debug"], check=True)
    subprocess.run(["strip", bare], check=True)
    subprocess.run(["objcopy", f"--add-gnu-debuglink={tmp_path}/bare.debug", bare], check=True)
    table = FunctionTable(bare, str(bare))
    assert table.build_id == ""
    assert table.name(table.find(virtual + 2) or 0) == "hidden_sum"
    with open(tmp_path / "bare.debug", "ab") as file:
        file.write(b"changed")
    assert FunctionTable(bare, str(bare)).debug_file == ""


def test_a_compressed_table_names_local_functions(program: Path, tmp_path: Path) -> None:
    """.gnu_debugdata, as Fedora and RHEL have it."""
    import lzma

    stripped, small = tmp_path / "stripped", tmp_path / "small"
    subprocess.run(["objcopy", "--only-keep-debug", program, small], check=True)
    (tmp_path / "small.xz").write_bytes(lzma.compress(small.read_bytes()))
    shutil.copy(program, stripped)
    subprocess.run(["strip", stripped], check=True)
    subprocess.run(["objcopy", f"--add-section=.gnu_debugdata={tmp_path}/small.xz", stripped], check=True)
    virtual = next(start for start, _, name in functions_of(str(program)) if name == "hidden_sum")
    table = FunctionTable(stripped)
    assert table.name(table.find(virtual) or 0) == "hidden_sum"


_COLD = """
#include <stdlib.h>
__attribute__((cold, noinline)) int seldom(int x) { return rand() + x; }
#define CASE(n) if (__builtin_expect(v[n] == 7 * n, 0)) { v[n] = seldom(n); v[n + 1] += seldom(v[n]) * n; }
#define CASES CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
int loop(int n, int *v) { int sum = 0; for (int i = 0; i < n; i++, v++) { CASES sum += v[0]; } return sum; }
int other(int n, int *v) { int sum = 5; for (int i = 0; i < n; i++, v++) { CASES sum -= v[0]; } return sum; }
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="jumps are read on x86-64")
def test_a_part_that_was_moved_out_of_a_function_has_its_name(tmp_path: Path) -> None:
    """As CPython's evaluation loop in Debian's 3.14, most of which is called cold. Another function's is not its."""
    library = compile_c(_COLD, tmp_path / "cold.so", "-shared", "-O2", "-freorder-blocks-and-partition")
    parts = {name: (start, end) for start, end, name in functions_of(str(library)) if name.endswith(".cold")}
    assert parts.keys() == {"loop.cold", "other.cold"}, "gcc did not split them"
    subprocess.run(["strip", library], check=True)
    table = FunctionTable(library, split=("loop", "seldom"))
    (start, end), (strange, _) = parts["loop.cold"], parts["other.cold"]
    for address in (start, start + 1, end - 1):
        function = table.find(address)
        assert function is not None
        assert table.name(function) == "loop.cold"
        assert table.bounds(address) == (start, end)
    assert table.find(strange) is None
    assert FunctionTable(library).find(start) is None
    assert NativeFrame("_PyEval_EvalFrameDefault.cold", "python", 0, "", "native").evaluates


def test_functions_within_functions_and_without_a_size(tmp_path: Path) -> None:
    source = """
    __asm__(".text\\n.globl outer, inner, bare, last\\n.type outer,@function\\n.type inner,@function\\n"
            ".type bare,@function\\n.type last,@function\\n"
            "outer: .skip 16\\ninner: .skip 8\\n.size inner, 8\\n.skip 40\\n.size outer, 64\\n"
            ".skip 16\\nbare: .skip 32\\nlast: .skip 4\\n.size last, 4\\n.skip 12\\n");
    """
    library = compile_c(source, tmp_path / "asm.so", "-shared", "-nostdlib")
    at = {name: start for start, _, name in functions_of(str(library))}
    at["bare"] = next(
        int(line.split()[0], 16)
        for line in subprocess.run(["nm", library], capture_output=True, text=True).stdout.splitlines()
        if line.endswith(" bare")
    )

    def name(table: FunctionTable, address: int) -> str:
        function = table.find(address)
        return "" if function is None else table.name(function)

    table = FunctionTable(library)
    expected = {0: "outer", 15: "outer", 16: "inner", 23: "inner", 24: "outer", 63: "outer", 64: "", 79: ""}
    assert {n: name(table, at["outer"] + n) for n in expected} == expected
    assert [name(table, at["bare"] + n) for n in (0, 31, 32, 35, 36)] == ["bare", "bare", "last", "last", ""]
    # Without local symbols nobody knows what lies behind it.
    subprocess.run(["strip", library], check=True)
    assert [name(FunctionTable(library), at["bare"] + n) for n in (0, 1, 31)] == ["bare", "", ""]


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "text"])
def test_damaged_files_are_refused_and_never_crash(program: Path, tmp_path: Path, damage: str) -> None:
    whole = program.read_bytes()
    chosen = random.Random(3)
    for attempt in range(60 if damage in ("cut", "noise") else 1):
        data = bytearray(whole)
        if damage == "cut":
            del data[chosen.randrange(len(data)) :]
        elif damage == "noise":
            # Headers of the file, the segments and the sections.
            tables = [(0, 1000), (len(data) - 64 * 40, len(data))]
            for _ in range(20):
                data[chosen.randrange(*chosen.choice(tables))] = chosen.randrange(256)
        else:
            data = bytearray(b"" if damage == "empty" else b"no program\n" * 99)
        file = tmp_path / f"damaged{attempt}"
        file.write_bytes(data)
        try:
            table = FunctionTable(file)
        except NotElf:
            continue
        for address in (0, 0x1139, 1 << 63):
            function = table.find(address)
            if function is not None:
                assert table.name(function) is not None


def test_what_takes_a_library_s_place_has_its_own_names(
    program: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbols, "_MISS_REFRESH_NS", 1 << 62)  # nothing is read again but by refresh
    first = compile_c("int other_1(void){return 1;} int reload_me(void){return 1;}", tmp_path / "a.so", "-shared")
    second = compile_c("int reload_me(void){return 1;} int other_2(void){return 1;}", tmp_path / "b.so", "-shared")
    running = start(program)
    names = Symbols(running.pid)
    assert leaf(names, int(running.ask(f"open {first}"), 16)).function != "reload_me"  # read before it was loaded
    names.refresh()
    at = int(running.ask(f"open {first}"), 16)
    assert leaf(names, at).function == "reload_me"
    before = {address: leaf(names, address).text for address in range(at - 16, at + 16)}
    main = leaf(names, int(running.hello[0], 16))
    for _ in range(2):
        running.ask("close")
    at = int(running.ask(f"open {second}"), 16)
    names.refresh()
    assert leaf(names, at).function == "reload_me"
    mapping = mapping_of(running.pid, "b.so")
    changed = 0
    for address, text in before.items():
        if mapping.start <= address < mapping.end:
            truth = names_at(str(second), mapping, address)
            assert leaf(names, address).text in (truth or {leaf(names, address).text})
            assert leaf(names, address).module == str(second)
            changed += leaf(names, address).text != text
    assert changed, "the second library did not take the place of the first: the test shows nothing"
    assert leaf(names, int(running.hello[0], 16)) is main, "what stayed in place is not looked up again"
    names.close()


@as_root
def test_a_program_that_was_deleted_or_replaced_keeps_its_names(program: Path, tmp_path: Path, start: Start) -> None:
    for replaced in (False, True):
        file = tmp_path / f"doomed{replaced}"
        shutil.copy(program, file)
        running = start(file)
        file.unlink()
        if replaced:
            compile_c("int main(void) { return 0; } int hidden_sum_2(void) { return 1; }", file)
        names = Symbols(running.pid)
        assert leaf(names, int(running.hello[0], 16)).function == "hidden_sum"
        assert leaf(names, int(running.hello[0], 16)).module == str(file)
        names.close()


@as_root
def test_a_process_with_mounts_and_pids_of_its_own(program: Path, tmp_path: Path, start: Start) -> None:
    """As in a container: the file is nowhere else, and the perf map has the number that the process sees."""
    inside = tmp_path / "inside"
    inside.mkdir()
    script = (
        f"mount -t tmpfs none {inside} && cp {program} {inside}/contained && mount --bind {inside} /tmp && "
        f"exec /tmp/contained"
    )
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
    if subprocess.run([*unshare[:5], "true"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    running = start(*unshare)
    pid = int(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0])
    assert not (inside / "contained").exists()
    at = int(running.ask("jit"), 16)
    assert running.ask(f"write /tmp/perf-1.map ={at:x} 100 compiled()") == "0"
    names = Symbols(pid)
    assert leaf(names, int(running.hello[0], 16)).function == "hidden_sum"
    assert leaf(names, at + 16) == NativeFrame("compiled()", "[jit]", 16, "", "jit")
    names.close()


@pytest.fixture
def jit(program: Path, start: Start) -> Iterator[tuple[Symbols, int, Path]]:
    """A process with executable memory of no file: its symbols, where the memory lies, and its perf map."""
    running = start(program)
    at = int(running.ask("jit"), 16)
    path = Path(f"/tmp/perf-{running.pid}.map")
    names = Symbols(running.pid)
    yield names, at, path
    names.close()
    path.unlink(missing_ok=True)


def test_a_perf_map_grows_and_its_later_lines_win(jit: tuple[Symbols, int, Path]) -> None:
    names, at, path = jit
    assert leaf(names, at + 5) == NativeFrame("", "[anon]", 5, "", "native")
    with open(path, "w") as file:
        file.write(f"{at:x} 20 first with spaces\n0x{at + 0x20:x} 0x20 second\n{at + 0x40:x} 20 thi")
        file.flush()
        names.refresh()
        assert leaf(names, at + 5) == NativeFrame("first with spaces", "[jit]", 5, "", "jit")
        assert leaf(names, at + 0x3F).function == "second"
        assert leaf(names, at + 0x40).function == ""
        file.write(f"rd\n{at + 0x10:x} 20 over both\nnonsense\n{at:x} zz bad\n{at:x} 0 empty\n\n")
        file.flush()
        # No refresh: an address that has no name yet is looked for in what was added.
        assert leaf(names, at + 0x41).function == "third"
        expected = {5: "first with spaces", 0x10: "over both", 0x2F: "over both", 0x30: "second", 0x60: ""}
        assert {n: leaf(names, at + n).function for n in expected} == expected
        assert names.counters["perf_map_lines_rejected"] == 3
        file.write(f"{at + 0x80:x} 10 old\n{at + 0x80:x} 10 new\n{at + 0xA0:x} 10 other\n")
        file.flush()
        assert [leaf(names, at + n).function for n in (0x80, 0xA0)] == ["new", "other"]
        # Many parts are joined, and the last line still wins.
        for n in range(40):
            file.write(f"{at:x} 20 version {n}\n{at + 0x100 * n:x} 10 other {n}\n")
            file.flush()
            names.refresh()
        assert leaf(names, at + 5).function == "version 39"
        assert leaf(names, at + 0x1F).function == "version 39"
        assert leaf(names, at + 0x705).function == "other 7"
        assert [leaf(names, at + n).function for n in (0x41, 0x80)] == ["third", "new"]
    # Begun anew.
    path.write_text(f"{at:x} 10 anew\n")
    names.refresh()
    assert leaf(names, at + 5).function == "anew"
    assert leaf(names, at + 0x705).function == ""


@as_root
def test_a_perf_map_of_somebody_else_is_not_believed(jit: tuple[Symbols, int, Path]) -> None:
    names, at, path = jit
    path.write_text(f"{at:x} 20 planted\n")
    os.chown(path, 12345, 12345)
    names.refresh()
    assert leaf(names, at).function == ""
    path.unlink()
    os.mkfifo(path)
    names.refresh()
    assert leaf(names, at).function == ""


def test_the_vdso_has_names(program: Path, tmp_path: Path, start: Start) -> None:
    running = start(program)
    base = int(running.hello[2], 16)
    names = Symbols(running.pid)
    with open(f"/proc/{running.pid}/mem", "rb", buffering=0) as memory:
        memory.seek(base)
        image = memory.read(8192)
    dump = tmp_path / "vdso.so"
    dump.write_bytes(image)
    listed = functions_of(str(dump))
    assert listed
    for begin, end, _ in listed:
        truth = {name for first, last, name in listed if first <= begin < last}
        frame = leaf(names, base + (begin + end) // 2)
        assert frame.function in truth
        assert (frame.module, frame.kind) == ("[vdso]", "vdso")
    names.close()


def test_after_the_end_what_was_read_is_still_reported(program: Path, start: Start) -> None:
    running = start(program)
    at = int(running.hello[0], 16)
    libc = mapping_of(running.pid, "libc.so")
    names = Symbols(running.pid)
    before = leaf(names, at)
    running.end()
    names.refresh()
    assert leaf(names, at) == before
    assert leaf(names, at + 1).function == "hidden_sum"
    # The C library had not been read yet: its file is still where it was.
    known = next(start for start, _, name in functions_of(libc.path) if name == "getenv")
    offset = known - next(v - o for o, v, size in segments_of(libc.path) if v <= known < v + size)
    assert leaf(names, offset - libc.offset + libc.start).function == "getenv"
    assert leaf(names, 0x1000).text == "[unmapped]"
    assert names.verified(np.array([at, at, at], np.uint64)) == (1, False)
    names.close()
    assert leaf(names, at) == before
    with pytest.raises(OSError):
        Symbols(running.pid)


def test_a_zombie_is_one_that_has_ended() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with pytest.raises(OSError):
        Symbols(child)
    os.waitpid(child, 0)


def test_processes_share_what_was_read_of_a_file(program: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(symbols, "FunctionTable", lambda *a: [read.append(a[0]), FunctionTable(*a)][1])
    symbols._tables.clear()
    for _ in range(3):
        running = start(program)
        names = Symbols(running.pid)
        assert leaf(names, int(running.hello[0], 16)).function == "hidden_sum"
        names.close()
    assert len(read) == 1


WALKED = r"""
/* Its own beginning, so that the chain of frame pointers is whole; nothing of libc. */
typedef unsigned long u64;
static long call3(long n, long a, long b, long c) {
    long r; __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory"); return r;
}
__attribute__((noinline)) void leaf(void) {
    u64 chain[8], *fp = __builtin_frame_address(0); int n = 0;
    chain[n++] = (u64)leaf + 8;
    while (fp && n < 8) { chain[n++] = fp[1]; fp = (u64 *)fp[0]; }
    chain[7] = (u64)n;
    call3(1, 1, (long)chain, sizeof chain);
    char c; call3(0, 0, (long)&c, 1);
}
void (*pointers[40])(void);
__attribute__((noinline)) void indirect(void) { void (*volatile f)(void) = leaf; f(); __asm__ volatile(""); }
__attribute__((noinline)) void by_memory(int i) { pointers[i] = indirect; pointers[i](); __asm__ volatile(""); }
__attribute__((noinline)) void direct(int i) { by_memory(i); __asm__ volatile(""); }
void entered(void) { direct(33); call3(60, 0, 0, 0); }
__asm__(".globl _start\n.type _start,@function\n_start: xor %ebp,%ebp\ncall entered_frame\nhlt\n.size _start,.-_start\n"
        "entered_frame: push %rbp\nmov %rsp,%rbp\ncall entered\nhlt\n");
"""


@x86_64
def test_a_whole_chain_is_believed_and_a_doubtful_one_is_not(tmp_path: Path) -> None:
    flags = ("-nostdlib", "-static", "-O1", "-fno-omit-frame-pointer", "-fno-stack-protector", "-fno-ipa-cp")
    file = compile_c(WALKED, tmp_path / "walked", *flags)
    process = subprocess.Popen([file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    words = np.frombuffer(process.stdout.read(64), np.uint64)
    chain = words[: int(words[7])]
    names = Symbols(process.pid)
    assert [frame.function for frame in names.name(chain)][:5] == ["leaf", "indirect", "by_memory", "direct", "entered"]
    assert names.name(chain)[-1].function == "_start"
    assert names.verified(chain) == (len(chain), True)
    assert names.verified(chain[:1]) == (1, False)
    for end in range(2, len(chain)):
        assert names.verified(chain[:end]) == (1, False), "its beginning is missing"
    assert names.counters["native_chains_doubted"] == len(chain) - 2
    for wrong in (chain[2] + np.uint64(1), np.uint64(0x7FFFFFFFE000), np.uint64(0), chain[0]):
        for place in range(1, len(chain)):
            doubtful = chain.copy()
            doubtful[place] = wrong
            assert names.verified(doubtful) == (1, False)
    assert names.verified(chain[:0]) == (0, False)
    names.close()
    process.communicate(b"\n")


@x86_64
def test_calls_are_those_that_objdump_shows(program: Path, start: Start) -> None:
    running = start(program)
    mapping = mapping_of(running.pid, "ld-")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", mapping.path], capture_output=True, text=True, check=True
    ).stdout
    shift = mapping.start - mapping.offset + segments_of(mapping.path)[0][0] - segments_of(mapping.path)[0][1]
    after_call, after_other = [], []
    previous = ""
    for line in listing.splitlines():
        place, colon, text = line.partition(":\t")
        if not colon:
            previous = ""
            continue
        if previous:
            book = after_call if "call" in previous.split()[:3] else after_other
            book.append(int(place, 16) + shift)
        previous = text
    names = Symbols(running.pid)
    assert len(after_call) > 200
    missed = [hex(a) for a in after_call if not names._behind_calls([a])]
    assert not missed
    # An E8 or FF in the right place of other instructions deceives it now and then.
    taken = sum(names._behind_calls([a]) for a in after_other)
    assert taken / len(after_other) < 0.005
    names.close()


def test_frame_pointers_are_followed_as_far_as_the_copy_reaches() -> None:
    sp = 0x7000
    stack = np.zeros(16, np.uint64)
    stack[2:4] = (sp + 7 * 8, 0x111)
    stack[7:9] = (sp + 12 * 8, 0x222)
    stack[12:14] = (0, 0x333)
    unwind = FramePointers().unwind
    assert unwind(0x100, sp, sp + 16, stack.tobytes()).tolist() == [0x100, 0x111, 0x222, 0x333]
    assert unwind(0x100, sp, sp + 16, stack[:10].tobytes()).tolist() == [0x100, 0x111, 0x222]
    assert unwind(0x100, sp, sp + 17, stack.tobytes()).tolist() == [0x100]
    assert unwind(0x100, sp, 0, stack.tobytes()).tolist() == [0x100]
    stack[7] = sp  # it may not go back
    assert unwind(0x100, sp, sp + 16, stack.tobytes()).tolist() == [0x100, 0x111, 0x222]
