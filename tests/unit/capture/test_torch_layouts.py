"""What the kernel has of each process's PyTorch is what its own files say, whatever comes and goes."""

from __future__ import annotations

import errno
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.process.pytorch import LAYOUTS, GroupLayout, Layout
from argus.capture.torch_layouts import TorchLayouts
from argus.model import records

KNOWN: list[Layout | None] = [None, LAYOUTS["x86_64", 2, 2], Layout(1, 2, GroupLayout(3, 4, 5, 6))]


@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_is_written_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    rows: dict[int, bytes] = {}
    table: Any = SimpleNamespace(set=rows.__setitem__, delete=lambda pid: rows.pop(pid, None))
    layouts = TorchLayouts(table)
    slots: dict[Any, int] = {}
    of: dict[int, dict[Any, Layout | None]] = {}
    for _ in range(300):
        pid, key = draw.randrange(5), ("08:01", draw.randrange(4), 1, 1)
        what = draw.randrange(4)
        if what == 0:
            of[pid] = {("08:01", n, 1, 1): draw.choice(KNOWN) for n in draw.sample(range(4), draw.randrange(3))}
            layouts.set(pid, of[pid])
        elif what == 1:
            of.pop(pid, None)
            layouts.forget(pid)
        elif what == 2:
            slots[key] = next(n for n in range(256) if n not in slots.values())
            layouts.give(key, slots[key])
        else:
            slots.pop(key, None)
            layouts.take(key)
        expected = {}
        for one, own in of.items():
            known = {slots[each] + 1: layout for each, layout in own.items() if each in slots}
            if known:
                expected[one] = {
                    (file, *((0, 0, 0) if at is None else (at.numel, at.group.counter if at.group else 0, at.sizes)))
                    for file, at in known.items()
                }
        found = {}
        for one, row in rows.items():
            read = np.frombuffer(row, records.TORCH)
            assert len(read) == records.TORCHES
            found[one] = {(r["file"], r["numel"], r["counter"], r["sizes"]) for r in read if r["file"]}
        assert found == expected
    for one in range(5):
        layouts.forget(one)
    assert not rows
    assert not layouts._of
    assert not layouts._users


def test_further_pytorches_of_a_process_are_not_known() -> None:
    rows: dict[int, bytes] = {}
    table: Any = SimpleNamespace(set=rows.__setitem__, delete=lambda pid: rows.pop(pid, None))
    layouts = TorchLayouts(table)
    for n in range(5):
        layouts.give(("08:01", n, 1, 1), n)
    layouts.set(1, {("08:01", n, 1, 1): None for n in range(5)})
    assert np.frombuffer(rows[1], records.TORCH)["file"].tolist() == [1, 2]


def test_a_full_table_costs_that_process_alone_until_there_is_room() -> None:
    """It raised into the loop, and the process had none for good."""
    room: list[int] = []
    rows: dict[int, bytes] = {}

    class Table:
        def set(self, pid: int, row: bytes) -> None:
            if pid not in room:
                raise OSError(errno.E2BIG, "full")
            rows[pid] = row

        def delete(self, pid: int) -> bool:
            return rows.pop(pid, None) is not None

    layouts: Any = TorchLayouts(Table())  # type: ignore[arg-type]
    key: Any = ("08:01", 1, 1, 1)
    layouts.give(key, 9)
    layouts.set(77, {key: None})
    assert not rows
    room.append(77)
    layouts.set(77, {key: None})
    assert rows.keys() == {77}
    layouts.forget(77)
    assert not rows
    assert not (layouts._of)
    assert not (layouts._users)
    assert not (layouts._again)
