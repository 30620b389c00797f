"""Process groups of PyTorch that are at one address in turn."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.model.calls import CALLS, Layer
from argus.model.losses import Owner
from argus.model.records import COLLECTIVE, CONTROL
from argus.tables import collectives
from argus.tables.collectives import GENERATION_BITS, KEPT_ADDRESSES, KEPT_ENDS, ROOM, Generations

GLOO = next(call.id for call in CALLS if call.layer is Layer.TORCH and call.kind == "AllReduce")
ENDED = next(call.id for call in CALLS if call.layer is Layer.TORCH and call.kind == "comm_end")
HONEST, MALLORY = (1000, ""), (65_534, "")
A = 0x7F00_0000_1000


def called(pid: object, comm: object, ts_ns: object) -> NDArray[np.void]:
    pid, comm, ts_ns = np.broadcast_arrays(pid, comm, ts_ns)
    rows = np.zeros(len(np.atleast_1d(comm)), COLLECTIVE)
    rows["call"], rows["comm"], rows["ts_ns"], rows["pid"] = GLOO, comm, ts_ns, pid
    return rows


def ended(pid: object, comm: object, ts_ns: object) -> NDArray[np.void]:
    pid, comm, ts_ns = np.broadcast_arrays(pid, comm, ts_ns)
    rows = np.zeros(len(np.atleast_1d(comm)), CONTROL)
    rows["call"], rows["handle"], rows["ts_ns"], rows["pid"] = ENDED, comm, ts_ns, pid
    return rows


NO_ENDS, NO_CALLS = ended(0, [], 0), called(0, [], 0)


class Machine:
    """Processes of two owners: those from 100 on are Mallory's."""

    def __init__(self) -> None:
        self.lost: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()
        self.generations = Generations(self._whose, self._on_loss)

    def _whose(self, pid: int) -> Owner:
        self.asked[pid] += 1
        return HONEST if pid < 100 else MALLORY

    def _on_loss(self, pid: int, number: int) -> None:
        self.lost[pid] += number

    def end(self, pid: object, comm: object, ts_ns: object) -> list[int]:
        rows = ended(pid, comm, ts_ns)
        self.generations.number(rows, NO_CALLS)
        return [int(handle) for handle in rows["handle"]]

    def call(self, pid: object, comm: object, ts_ns: object) -> list[int]:
        rows = called(pid, comm, ts_ns)
        self.generations.number(NO_ENDS, rows)
        return [int(handle) for handle in rows["comm"]]

    @property
    def addresses(self) -> Counter[int]:
        return Counter({pid: len(each.addresses) for pid, each in self.generations._processes.items()})

    @property
    def size(self) -> int:
        return sum(
            collectives.OF_ADDRESS + len(address.ends)
            for each in self.generations._processes.values()
            for address in each.addresses.values()
        )


class Reference:
    """One event after the other, nothing forgotten but the oldest ends."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, int], tuple[int, list[int]]] = {}

    def number(self, control: NDArray[np.void], calls: NDArray[np.void]) -> None:
        for place in np.argsort(control["ts_ns"], kind="stable").tolist():
            if control[place]["call"] != ENDED:
                continue
            key = int(control[place]["pid"]), int(control[place]["handle"])
            before, ends = self.ends.get(key, (0, []))
            ends = sorted([*ends, int(control[place]["ts_ns"])])
            more = max(len(ends) - KEPT_ENDS, 0)
            self.ends[key] = before + more, ends[more:]
            control["handle"][place] += (before + len(ends) - 1) << GENERATION_BITS
        for place, row in enumerate(calls):
            before, ends = self.ends.get((int(row["pid"]), int(row["comm"])), (0, []))
            if row["call"] == GLOO:
                calls["comm"][place] += (before + sum(each < row["ts_ns"] for each in ends)) << GENERATION_BITS


@pytest.mark.parametrize("seed", range(12))
def test_generations_are_those_of_ends_one_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own, reference = Machine(), Reference()
    for turn in range(20):
        now, span = 100 * turn, 300  # some come turns late
        n, m = rng.integers(0, 200, 2)
        ends = ended(rng.integers(1, 3, n), A + 64 * rng.integers(0, 3 + seed, n), now + rng.integers(0, span, n))
        calls = called(rng.integers(1, 3, m), A + 64 * rng.integers(0, 3 + seed, m), now + rng.integers(0, span, m))
        ends["call"][rng.random(n) < 0.1] = 0
        calls["call"][rng.random(m) < 0.1] = 0
        expected = ends.copy(), calls.copy()
        reference.number(*expected)
        own.generations.number(ends, calls)
        assert np.array_equal(ends, expected[0])
        assert np.array_equal(calls, expected[1])
    assert not own.lost
    assert set(own.asked.values()) == {1}, "whose a process is"


@pytest.mark.parametrize("used", ["ended", "called"])
def test_ends_of_another_owner_s_groups_change_no_handle(used: str) -> None:
    own = Machine()
    own.end(1, [A], 100)
    assert own.call(1, [A, A + 64], 200) == [A + (1 << GENERATION_BITS), A + 64]
    for pid in range(100, 125):
        flood = 0x10000 + 64 * np.arange(KEPT_ADDRESSES)
        own.end(pid, flood, 300) if used == "ended" else own.call(pid, flood, 300)
    assert own.call(1, [A, A + 64], 400) == [A + (1 << GENERATION_BITS), A + 64]
    assert own.end(1, [A], 500) == [A + (1 << GENERATION_BITS)]
    assert own.call(1, [A], 600) == [A + (2 << GENERATION_BITS)]
    assert not own.lost[1]


def test_who_comes_when_the_room_is_full_has_its_part() -> None:
    own = Machine()
    for pid in range(100, 120):
        own.end(pid, 0x10000 + 64 * np.arange(KEPT_ADDRESSES), 300)
    for pid in range(1, 5):
        addresses = A + 64 * np.arange(1000)
        own.end(pid, addresses, 400)
        assert own.call(pid, addresses, 500) == (addresses + (1 << GENERATION_BITS)).tolist()
    for pid in range(1, 5):
        assert own.call(pid, addresses, 600) == (addresses + (1 << GENERATION_BITS)).tolist()
    assert own.addresses[1] == 1000


def test_what_is_kept_is_bounded() -> None:
    own = Machine()
    for turn in range(2):
        for pid in range(100, 120):
            own.end(pid, 64 * np.repeat(np.arange(KEPT_ADDRESSES + 100), 1 + 20 * (pid % 2)), 300 + turn)
            assert own.generations._size <= ROOM
    assert own.size == own.generations._size
    assert max(own.addresses.values()) <= KEPT_ADDRESSES
    own.generations.forget(list(range(100, 140)))
    assert not own.generations._processes
    assert not own.generations._of_owner
    assert own.generations._size == own.generations._shares._held.total() == 0


def test_addresses_that_were_used_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "KEPT_ADDRESSES", 3)
    own = Machine()
    own.call(1, [A], 1)
    for life in range(20):
        # One address is called again and again, the others once.
        own.end(1, [A + 64 * life + 64], 100 * life)
        assert own.call(1, [A], 100 * life + 50) == [A]
    assert own.addresses[1] == 3
    assert not own.lost, "none of them was in use"


@pytest.mark.parametrize("seed", range(6))
def test_no_handle_that_was_forgotten_comes_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "KEPT_ADDRESSES", 4)
    rng = np.random.default_rng(seed)
    own = Machine()
    over: set[int] = set()
    for life in range(400):
        address = A + 64 * int(rng.integers(0, 12))
        (handle,) = own.call(1, [address], 100 * life)
        assert handle not in over
        over |= set(own.end(1, [address], 100 * life + 50))


def test_groups_that_are_forgotten_while_they_may_be_called_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "KEPT_ADDRESSES", 4)
    own = Machine()
    own.call(1, A + 64 * np.arange(10), 1)
    assert own.lost == {1: 6}
    (handle,) = own.call(1, [A], 2)
    assert handle == A + (1 << GENERATION_BITS), "none that it had before"


def test_very_many_ends_and_calls_are_gone_through_once() -> None:
    """One after the other, with what is known of each address gone through for each, takes many minutes."""
    own, number = Machine(), 200_000
    ends = ended(100, A + 64 * np.arange(number), np.arange(number))
    calls = called(100, A + 64 * np.arange(number), number + np.arange(number))
    own.generations.number(ends, calls)
    assert (calls["comm"] >> np.uint64(GENERATION_BITS) == 1).all()
    assert own.size <= ROOM
