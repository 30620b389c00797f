"""Symbols of ELF files, as Argus's reader finds them, against what nm and pyelftools say of real libraries."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import given, settings
from hypothesis import strategies as st

from argus.capture.process import elf as elf_module
from argus.capture.process.elf import Elf, NotElf, SymbolFile, _rows_named


def _mapped(name: str) -> Path:
    """A library that this process maps."""
    import pyarrow  # noqa: F401 - it brings large libraries with it

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if name in Path(path).name:
            return Path(path)
    pytest.fail(f"this process maps no {name}")


LIBRARIES = ("libc.so.6", "libarrow.so", "libstdc++.so.6")


def _functions(path: Path) -> dict[str, set[int]]:
    """File offsets of all functions by name, by pyelftools."""
    addresses: dict[str, set[int]] = {}
    with path.open("rb") as file:
        elf = ELFFile(file)
        loaded = list(elf.iter_segments("PT_LOAD"))
        for section in elf.iter_sections():
            if not isinstance(section, SymbolTableSection):
                continue
            for symbol in section.iter_symbols():
                entry = symbol.entry
                if entry["st_info"]["type"] != "STT_FUNC" or entry["st_shndx"] == "SHN_UNDEF":
                    continue
                for part in loaded:
                    if part["p_vaddr"] <= entry["st_value"] < part["p_vaddr"] + part["p_filesz"]:
                        at = entry["st_value"] - part["p_vaddr"] + part["p_offset"]
                        addresses.setdefault(symbol.name, set()).add(at)
    return addresses


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("name", LIBRARIES)
def test_functions_are_where_pyelftools_finds_them(name: str) -> None:
    path = _mapped(name)
    expected = _functions(path)
    chosen = random.Random(1).sample(sorted(expected), min(400, len(expected)))
    elf = Elf(path)
    found = elf.functions([*chosen, "no_such_function", "x" * 9000])
    assert found.keys() == set(chosen)
    assert all(found[each] in expected[each] for each in chosen)
    file = SymbolFile(path)
    assert all(file.function(each, place) == at for each, (place, at) in elf.located(chosen).items())
    assert file.function(chosen[0], elf.located([chosen[1]])[chosen[1]][0]) is None


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("name", LIBRARIES)
def test_symbols_are_what_nm_lists(name: str) -> None:
    path = _mapped(name)
    listed = subprocess.run(["nm", "-D", "--defined-only", "-S", path], capture_output=True, text=True, check=True)
    expected: dict[str, set[tuple[int, int]]] = {}
    for line in listed.stdout.splitlines():
        words = line.split()
        if len(words) == 4 and words[2] not in "AV":
            expected.setdefault(words[3].partition("@")[0], set()).add((int(words[0], 16), int(words[1], 16)))
    found = Elf(path, dynamic_only=True).symbols(list(expected))
    assert found.keys() == expected.keys()
    assert all((symbol.address, symbol.size) in expected[each] for each, symbol in found.items())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab_", max_size=20), min_size=1, max_size=30),
    st.lists(st.text("ab_", max_size=20), max_size=8),
    st.integers(0, 3),
    st.binary(max_size=12),
)
def test_names_are_found_as_reading_each_finds_them(
    there: list[str], wanted: list[str], tails: int, rest: bytes
) -> None:
    text, begins = b"", []
    for name in there:
        begins += [len(text) + min(tail, len(name)) for tail in range(tails + 1)]  # linkers share tails
        text += name.encode() + b"\0"
    begins += range(len(text), len(text) + len(rest))
    text += rest  # a damaged table's last name has no end
    found = _rows_named(text, np.array(begins, np.uint32), wanted)
    expected: dict[str, list[int]] = {}
    for row, begin in enumerate(begins):
        name, end, _ = text[begin:].partition(b"\0")
        if end and name.decode(errors="replace") in wanted:
            expected.setdefault(name.decode(), []).append(row)
    assert found == expected


def test_a_table_of_an_address_beyond_its_names_is_passed_over() -> None:
    assert _rows_named(b"\0one\0", np.array([1, 4_000_000_000, 5], np.uint32), ["one"]) == {"one": [0]}
    assert _rows_named(b"", np.array([0, 1], np.uint32), ["one", ""]) == {}


@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_files_are_refused_and_never_crash(tmp_path: Path, damage: str) -> None:
    whole = Path(sys.executable).resolve().read_bytes()[: 1 << 20] + b""
    chosen = random.Random(5)
    for attempt in range(40):
        data = bytearray(whole)
        if damage == "cut":
            del data[chosen.randrange(len(data)) :]
        else:
            for _ in range(30):
                data[chosen.randrange(2000)] = chosen.randrange(256)
        path = tmp_path / str(attempt)
        path.write_bytes(data)
        try:
            elf = Elf(path)
            elf.functions(["main", "Py_GetVersion"])
            elf.symbols(["_PyRuntime"])
            elf.symbol_at(0x1234)
            file = SymbolFile(path)
            file.function("main", (1, 5))
            assert file.name_bytes >= 0
        except NotElf:
            continue


def test_no_more_is_read_than_any_library_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can map a file of a terabyte that is one hole."""
    monkeypatch.setattr(elf_module, "_MOST_BYTES", 1000)
    with pytest.raises(NotElf, match="claims"):
        Elf(_mapped("libc.so.6"))


def test_what_is_no_elf_file_is_refused(tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"text", b"\x7fELF\x01\x01" + bytes(90))):
        path = tmp_path / str(number)
        path.write_bytes(content)
        for reader in (Elf, SymbolFile):
            with pytest.raises(NotElf):
                reader(path)
