"""Where libraries have their functions is kept on disk: used only if nobody else can have written it, and only where
the library itself says the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from argus.capture.process import elf, symbol_cache
from argus.capture.process.symbol_cache import functions

NAMES = ("first_function", "second_function", "no_such_function")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(symbol_cache, "LARGE_BYTES", 1)
    return tmp_path / "cache" / symbol_cache.KIND


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return build(
        tmp_path / "library.so", "int first_function(void) { return 1; }\nint second_function(void) { return 2; }"
    )


def build(path: Path, source: str, *flags: str) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), "-Wl,--build-id=0xabcdef0123456789", *flags]
    subprocess.run(command, input=source.encode(), check=True)
    return path


def test_the_second_time_no_table_is_read(cache: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = functions(library, NAMES)
    assert first.offsets == elf.Elf(library).functions(NAMES)
    assert first.offsets.keys() == {"first_function", "second_function"}
    assert not first.kept
    monkeypatch.setattr(symbol_cache, "Elf", None)
    second = functions(library, NAMES)
    assert second.kept
    assert (second.offsets, second.text_bytes) == (first.offsets, first.text_bytes)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in cache.iterdir()] == [0o600]


def test_an_entry_is_for_one_file_alone(cache: Path, library: Path, tmp_path: Path) -> None:
    """Anybody may make a file of the same build id and layout, and have it read first."""
    functions(library, NAMES)
    copy = shutil.copy(library, tmp_path / "copy.so")
    assert not functions(copy, NAMES).kept
    assert functions(copy, NAMES).kept
    assert functions(library, NAMES).kept


def test_a_changed_library_misses(cache: Path, library: Path, tmp_path: Path) -> None:
    functions(library, NAMES)
    # The same build id: linkers make it up from what they wrote, and tools that patch libraries leave it.
    moved = build(
        tmp_path / "moved.so",
        "int other;\nint second_function(void) { return 22; }\nint first_function(void) { return 1; }",
    )
    found = functions(moved, NAMES)
    assert not found.kept
    assert found.offsets == elf.Elf(moved).functions(NAMES)
    assert functions(library, NAMES).kept
    assert not functions(library, NAMES[:1]).kept, "an entry is for what was looked for"


def rewritten(entry: Path, body: bytes) -> None:
    entry.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def test_what_others_could_have_written_is_not_believed(cache: Path, library: Path) -> None:
    whole = functions(library, NAMES)
    (entry,) = cache.iterdir()
    good = entry.read_bytes()

    def distrusted() -> bool:
        found = functions(library, NAMES)
        assert found.offsets == whole.offsets
        assert functions(library, NAMES).kept, "and kept again"
        return not found.kept

    assert not distrusted()
    for part in (good[:-1], good.replace(b"first", b"First"), b"", good[:64], good + b" "):
        entry.write_bytes(part)
        assert distrusted()
        assert entry.read_bytes() == good
    entry.chmod(0o620)
    assert distrusted()
    entry.unlink()
    os.mkfifo(entry, 0o600)
    assert distrusted()
    if os.geteuid() == 0:
        os.chown(entry, 65534, -1)
        assert distrusted()
    cache.chmod(0o777)
    assert not functions(library, NAMES).kept
    cache.chmod(0o700)
    entry.rename(cache / "other")
    entry.symlink_to(cache / "other")
    assert distrusted()


def test_an_entry_that_lies_is_detected_by_the_library(cache: Path, library: Path) -> None:
    """Whole and owned by the right user, as after a defect of Argus: a probe must never stand elsewhere."""
    whole = functions(library, NAMES)
    (entry,) = cache.iterdir()
    places = json.loads(entry.read_bytes().partition(b"\n")[2])["places"]
    first, second = places["first_function"], places["second_function"]
    lies: list[object] = [
        {"places": {"first_function": second}},
        {"places": {"first_function": [first[0], 1 << 40]}},
        {"places": {"first_function": [first[0], -1]}},
        {"places": {"first_function": [999, 1]}},
        {"places": {"first_function": [0, 0]}},
        {"places": {"first_function": "ab"}},
        {"places": {"main": first}},
        {"places": [first]},
        [],
        {},
        "text",
    ]
    for lie in lies:
        rewritten(entry, json.dumps(lie).encode())
        found = functions(library, NAMES)
        assert not found.kept, lie
        assert found.offsets == whole.offsets


def test_the_newest_entries_stay(cache: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbol_cache, "KEPT", 3)
    for number in range(6):
        functions(library, [*NAMES, str(number)])
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("what", ["off", "a file"])
def test_without_a_place_tables_are_read_each_time(
    what: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbol_cache, "LARGE_BYTES", 1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("ARGUS_CACHE_DIR", "off" if what == "off" else str(tmp_path / "file"))
    for _ in range(2):
        found = functions(library, NAMES)
        assert not found.kept
        assert len(found.offsets) == 2
