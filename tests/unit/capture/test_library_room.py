"""Nobody's processes fill what Argus may note of the files that processes map."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
from collections import Counter as Tally
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture import library_room
from argus.capture.library_room import LibraryRoom
from argus.capture.process import targets
from argus.capture.process.targets import Libraries
from argus.model import calls
from argus.model.losses import Owner

HOSTILE, HONEST = (65534, ""), (1000, "")


class AFile:
    def __init__(self, key: Any) -> None:
        self.key = key


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1600, 1600))
    monkeypatch.setattr(library_room, "MOST_LIBRARIES", 400)


def noted(room: LibraryRoom, pid: int, number: int, owner: Owner) -> Libraries:
    libraries: Any = Libraries(range(number))
    over = room.cut(pid, libraries, owner)
    assert libraries == list(range(number - over)), "the first of them stay"
    return libraries  # type: ignore[no-any-return]


def test_a_user_s_processes_leave_room_to_others() -> None:
    room = LibraryRoom()
    theirs = [noted(room, pid, 20, HOSTILE) for pid in range(100)]
    assert 190 < sum(map(len, theirs)) <= 200
    several = [noted(room, 1000 + pid, 20, (65534, str(pid))) for pid in range(100)]
    assert sum(map(len, theirs + several)) <= 2 * 400 / 3
    assert len(noted(room, 5000, 30, HONEST)) == 30


def test_files_of_a_user_leave_room_to_others() -> None:
    room, files = LibraryRoom(), [AFile(number) for number in range(1000)]
    assert sum(room.has_file(file, HOSTILE) for file in files) == 200, "half of a quarter"
    assert all(room.has_file(AFile(0), HONEST) for _ in range(1000)), "one that is there is no more"
    assert room.has_file(of_honest := AFile("honest"), HONEST)
    files.clear()
    gc.collect()
    again = [AFile(number) for number in range(1000)]
    assert sum(room.has_file(file, HOSTILE) for file in again) == 200 - 1
    assert room.has_file(of_honest, HONEST)


def test_a_process_that_is_looked_at_again_keeps_what_it_has() -> None:
    room, now = LibraryRoom(), {}
    for _ in range(50):
        for pid in range(6):
            now[pid] = noted(room, pid, 30, HOSTILE)
            assert len(now[pid]) == 30


@pytest.mark.parametrize("users", [1, 3, 20])
def test_others_take_no_libraries_of_a_process_that_has_some(users: int) -> None:
    """Looked at again after a dlopen it had none."""
    room = LibraryRoom()
    kept = {pid: noted(room, pid, 30, HONEST) for pid in range(3)}
    theirs = [
        noted(room, 1000 * user + pid, 20, (65534 + user, "")) for user in range(1, users + 1) for pid in range(20)
    ]
    for pid in range(3):
        kept[pid] = noted(room, pid, 31, HONEST)
        assert len(kept[pid]) >= 30
    assert sum(map(len, [*kept.values(), *theirs])) <= 400
    assert len(noted(room, 0, 30, (5000, ""))) <= 30
    kept.clear()
    del theirs
    other = noted(room, 0, 1000, (5000, ""))
    assert len(other) == 200, "a number that is given again brings nothing of its last process"


@pytest.mark.parametrize("seed", range(10))
def test_what_is_counted_is_what_lives(seed: int) -> None:
    draw, room = random.Random(seed), LibraryRoom()
    now: dict[int, tuple[Owner, Libraries]] = {}
    for _ in range(400):
        pid, owner = draw.randrange(40), draw.choice([HOSTILE, HONEST, (0, "a"), (0, "b")])
        if draw.random() < 0.3:
            now.pop(pid, None)
        else:
            now[pid] = owner, noted(room, pid, draw.randrange(20), owner)
        room._libraries.settle()
        expected = Tally[Owner]()
        for of, number in ((each[0], len(each[1])) for each in now.values()):
            expected[of] += number
        assert room._libraries._of_owner == +expected
        assert room._libraries._all == room._libraries._of_user.total() == expected.total() <= 400
        assert set(room._libraries._by_key) == set(now)


def an_answer(path: Path, at: int = 16) -> Any:
    status = os.stat(path)
    row = {
        "status": [*status[:6], status.st_size, status.st_ctime_ns, status.st_mtime_ns],
        "offsets": dict.fromkeys(calls.BY_SYMBOL, at),
        "roles": ["libcuda"],
        "path": str(path),
        "device": "08:01",
        "inode": status.st_ino,
        "deleted": False,
        "on_overlay": False,
        "text_bytes": 1,
        "layout": None,
        "rank_offset": None,
    }
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    what = json.loads(json.dumps({"libraries": [row], "unread": 0, "entries": []}))
    return SimpleNamespace(what=what, fds=[fd])


def test_processes_that_map_a_file_share_what_is_known_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had functions of its own: 2.9 MiB a process with 200 files."""
    monkeypatch.setattr(targets, "_room", LibraryRoom())
    (file := tmp_path / "lib.so").write_bytes(b"1")
    one, other, changed = (
        targets._of_reader(pid, answer)
        for pid, answer in ((1, an_answer(file)), (2, an_answer(file)), (3, an_answer(file, 32)))
    )
    assert one[0].offsets is other[0].offsets
    assert one[0].offsets == dict.fromkeys(calls.BY_SYMBOL, 16)
    assert changed[0].offsets == dict.fromkeys(calls.BY_SYMBOL, 32)
    assert [one[0].pid, other[0].pid] == [1, 2]
    reference = one[0].file
    assert reference in targets._offsets_of
    del one, other, changed, reference
    gc.collect()
    assert not any(each.key[1] == os.stat(file).st_ino for each in targets._offsets_of)


def test_files_beyond_the_room_are_counted_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_room", LibraryRoom())
    monkeypatch.setattr(targets, "owner_of", lambda pid: HOSTILE)
    monkeypatch.setattr(library_room, "MOST_FILES", 6)
    kept = []
    for number in range(6):
        (file := tmp_path / f"{number}.so").write_bytes(b"1")
        answer = an_answer(file)
        (fd,) = answer.fds
        kept.append(targets._of_reader(number, answer))
        if kept[-1].unread:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)
    assert [(len(each), each.unread) for each in kept] == [(1, 0)] * 3 + [(0, 1)] * 3
    kept.clear()
    gc.collect()
    assert len(targets._of_reader(7, an_answer(file))) == 1, "there is room again"
