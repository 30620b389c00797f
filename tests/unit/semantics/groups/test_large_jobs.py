"""Communicators of jobs with more of them than honest ones have: what a part takes, and that the parts change nothing.

The reference of each shortcut is the plain way to the same result, on small jobs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.model.calls import BY_SYMBOL, CALLS, Layer
from argus.model.groups import Membership, Place
from argus.model.records import COLLECTIVE, CONTROL
from argus.semantics.groups import communicators
from argus.semantics.groups.communicators import CROWDED, MOST_LIVES, RankCalls, find_groups, groups_in_parts
from argus.semantics.steps.by_calls import collective_codes

INIT, SPLIT = BY_SYMBOL["ncclCommInitRank"].id, BY_SYMBOL["ncclCommSplit"].id
QUERY = next(call.id for call in CALLS if call.kind == "comm_query")
GLOO = next(call.id for call in CALLS if call.layer is Layer.TORCH and call.kind == "AllReduce")
MS = 1_000_000


def finished(parts: Generator[None, None, Any]) -> Any:
    """What a generator returns."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            return done.value


def calls_in_parts(parts: Iterator[None]) -> list[int]:
    """Functions that each part calls, Python's and C's: what it takes, whatever the machine."""
    counts = []

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            counts[-1] += 1

    before = sys.getprofile()
    while True:
        counts.append(0)
        sys.setprofile(count)
        try:
            next(parts)
        except StopIteration:
            return counts
        finally:
            sys.setprofile(before)


def a_rank(rank: int, calls: NDArray[np.void], *, waits: int = 1, **known: Any) -> RankCalls:
    """Whose calls are each followed by a wait, or each so many."""
    begun = calls["ts_ns"][waits - 1 :: waits].astype(np.int64) + 2000
    return RankCalls(rank, calls, begun, np.full(len(begun), MS // 2), **known)


def calls_of(number: int, comms: int, *, one_after_the_other: bool = False, apart: int = 1) -> NDArray[np.void]:
    """So many calls in so many communicators, in turns or one after the other."""
    rows, each = np.zeros(number, COLLECTIVE), number // comms
    places = np.arange(number)
    rows["comm"] = places // each + 1 if one_after_the_other else places % comms + 1
    rows["seq"] = (places % each if one_after_the_other else places // comms) * apart
    rows["ts_ns"], rows["count"], rows["call"] = places * MS + 1000, 9, GLOO
    return rows


def of_one_name(rank: int, lives: int, *, one_after_the_other: bool = False) -> RankCalls:
    rows = calls_of(8 * lives, lives, one_after_the_other=one_after_the_other)
    rows["stream"] = rows["seq"] + 1
    return a_rank(rank, rows, named={life + 1: Membership("g", rank, 2, life) for life in range(lives)})


def splitting(rank: int, number: int) -> RankCalls:
    rows = np.zeros(number, CONTROL)
    rows["call"], rows["handle"], rows["parent"], rows["ts_ns"] = SPLIT, np.arange(number) + 1, 1, np.arange(number)
    rows["call"][0], rows["rank"], rows["nranks"], rows["data"][:, 0] = INIT, rank, 8, 7
    rows["color"] = rank % 2
    return RankCalls(rank, np.empty(0, COLLECTIVE), control=rows)


def test_groups_of_one_name_at_one_time_are_compared_a_few_with_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that says it has hundreds of one name: the newest are lined up, of the others it is said."""
    compared: list[int] = []
    apart = communicators._apart
    monkeypatch.setattr(communicators, "_apart", lambda a, b: (compared.append(a.comm), apart(a, b))[1])
    rows = find_groups([of_one_name(rank, 400) for rank in range(3)])
    assert len(compared) <= 2 * MOST_LIVES**2
    lined_up = rows[rows["error"] == ""]
    assert set(rows["error"]) == {"", CROWDED}
    assert Counter(lined_up["rank"].tolist()) == dict.fromkeys(range(3), MOST_LIVES)
    assert set(Counter(lined_up["comm_group"].tolist()).values()) == {3}
    assert lined_up["comm"].min() == 400 - MOST_LIVES + 1, "the newest"
    others = rows[rows["error"] == CROWDED]
    assert len(set(others["comm_group"].tolist())) == len(others)
    assert (set(rows["joined_by"]), set(rows["nranks"])) == ({"name"}, {2})


def test_many_groups_of_one_name_one_after_the_other_are_all_lined_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program has them that makes its groups anew for each evaluation."""
    compared: list[int] = []
    apart = communicators._apart
    monkeypatch.setattr(communicators, "_apart", lambda a, b: (compared.append(a.comm), apart(a, b))[1])
    rows = find_groups([of_one_name(rank, 400, one_after_the_other=True) for rank in range(2)])
    assert set(rows["error"]) == {""}
    assert set(Counter(rows["comm_group"].tolist()).values()) == {2}
    assert len(compared) <= 4 * 400


def test_groups_of_one_name_that_no_other_rank_has_do_not_add_up() -> None:
    """Ranks whose groups are never the same: there is no end to what the next one would be compared with."""
    ranks = []
    for rank in range(12):
        own = of_one_name(rank, 40)
        shifted = own.collectives["ts_ns"] + np.uint64(200 * MS) * (own.collectives["seq"] == rank)
        own.collectives["ts_ns"], own.collectives["stream"] = shifted, 1 + rank * 7 + own.collectives["seq"] * 100
        ranks.append(own)
    compared: list[int] = []
    apart = communicators._apart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "_apart", lambda a, b: (compared.append(a.comm), apart(a, b))[1])
        rows = find_groups(ranks)
    assert len(rows) == 12 * 40
    assert len(compared) <= 11 * MOST_LIVES**2


LIMITS: dict[str, tuple[Callable[[], list[RankCalls]], int]] = {
    "groups of one name at one time": (lambda: [of_one_name(rank, 400) for rank in range(2)], 20_000),
    "groups of one name in turns": (
        lambda: [of_one_name(rank, 400, one_after_the_other=True) for rank in range(2)], 20_000),
    "names": (lambda: [
        a_rank(rank, of_one_name(0, 500).collectives,
               named={comm + 1: Membership(str(comm), rank, 3) for comm in range(500)}) for rank in range(3)], 20_000),
    "splits": (lambda: [splitting(rank, 1024) for rank in range(16)], 20_000),
    "communicators": (lambda: [a_rank(rank, calls_of(4096, 4096)) for rank in range(2)], 20_000),
    "offsets": (lambda: [a_rank(rank, calls_of(4096, 1, apart=15), waits=64) for rank in range(2)], 1_000),
}  # fmt: skip
"""Jobs at the limits of what is kept of a rank, and the calls that a part may take: a few milliseconds each."""


@pytest.mark.parametrize("name", LIMITS)
def test_no_part_takes_long(name: str) -> None:
    ranks, most = LIMITS[name]
    find_groups([of_one_name(rank, 2) for rank in range(2)])  # what is imported once is no part's own
    assert max(calls_in_parts(groups_in_parts(ranks()))) <= most


# ---- what has a shortcut, and the plain way


def dense(a: list[communicators._Life], b: list[communicators._Life]) -> dict[int, int]:
    """Which lives are the same, all compared with all."""
    if len(a) == len(b) == 1:
        return {0: 0}
    begins = [np.array([life.begin for life in lives]) for lives in (a, b)]
    spacing = min(int(np.diff(np.sort(each)).min()) for each in begins if len(each) > 1)
    apart = np.full((len(b), len(a)), np.inf)
    for other, life in enumerate(b):
        for one, its in enumerate(a):
            limit = max(life.end - life.begin, its.end - its.begin, spacing) / 2
            gap = max(life.begin, its.begin) - min(life.end, its.end)
            if gap < limit and communicators._apart(its, life) < limit:
                apart[other, one] = communicators._apart(its, life)
    nearest, back = apart.argmin(axis=1), apart.argmin(axis=0)
    return {
        place: int(nearest[place])
        for place in range(len(b))
        if back[nearest[place]] == place and np.isfinite(apart[place, nearest[place]])
    }


def some_lives(rng: np.random.Generator) -> list[communicators._Life]:
    lives = []
    for turn in range(int(rng.integers(1, 9))):
        counts = np.sort(rng.choice(30, int(rng.integers(1, 12)), replace=False)).astype(np.int64)
        begin = int(rng.integers(0, 40)) * 10
        ts = begin + counts * int(rng.integers(1, 4)) + rng.integers(0, 3, len(counts))
        lives.append(
            communicators._Life(turn, turn, 0, int(ts.min()), int(ts.max()), counts, ts, np.arange(len(counts)))
        )
    return lives


def test_the_same_lives_are_found_as_by_comparing_all_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "CELLS", 10)  # several portions
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(1000):
        a, b = some_lives(rng), some_lives(rng)
        same = finished(communicators._same_lives(a, b))
        assert same == dense(a, b)
        found += len(same)
    assert found > 1000


def plain_lives(calls: RankCalls) -> list[tuple[Any, ...]]:
    """A rank's groups whose calls carry a count, each looked for among all calls."""
    lives = []
    for comm, place in calls.named.items():
        own = calls.collectives[(calls.collectives["comm"] == comm) & (calls.collectives["stream"] > 0)]
        if len(own):
            ts = own["ts_ns"].astype(np.int64) + calls.clock_ns
            counts, first = np.unique(own["stream"].astype(np.int64) - 1, return_index=True)
            seq = own["seq"].astype(np.int64)
            lives.append((place, comm, int(ts.min()), int(ts.max()), counts.tolist(), ts[first].tolist(),
                          seq[first].tolist()))  # fmt: skip
    return lives


def plain_traffic(calls: RankCalls) -> list[tuple[Any, ...]]:
    """A rank's calls by communicator, each looked for among all calls."""
    traffic, rows = [], calls.collectives
    for comm in np.unique(rows["comm"]).tolist():
        chosen = np.flatnonzero(rows["comm"] == comm)
        chosen = chosen[np.argsort(rows["seq"][chosen], kind="stable")][-communicators.RECENT :]
        ts = rows["ts_ns"][chosen].astype(np.int64)
        ends = communicators._ends(calls, ts) if calls.ends is None else calls.ends[chosen] + calls.clock_ns
        codes = collective_codes(rows[chosen], with_comm=False).view(np.int64)
        columns = (codes, rows["seq"][chosen], ts + calls.clock_ns, ends, communicators._blocked(calls, ts))
        traffic.append((comm, *(column.tolist() for column in columns)))
    return traffic


def some_calls(rng: np.random.Generator, rank: int) -> RankCalls:
    """Calls in any order of a few communicators, some of them with names, seen made, or read from memory."""
    number, comms = int(rng.integers(0, 120)), int(rng.integers(1, 7))
    rows = np.zeros(number, COLLECTIVE)
    rows["comm"], rows["call"] = rng.integers(1, comms + 1, number), GLOO
    rows["ts_ns"] = np.sort(rng.integers(1, 1000, number)) * MS
    for comm in range(1, comms + 1):
        own = np.flatnonzero(rows["comm"] == comm)
        rows["seq"][own] = np.arange(len(own)) + int(rng.integers(0, 3))
        rows["count"][own] = np.arange(len(own)) % int(rng.integers(1, 4))
        rows["stream"][own] = 1 + np.cumsum(rng.integers(0, 2, len(own))) if rng.integers(3) else 0
    control = np.zeros(int(rng.integers(0, 12)), CONTROL)
    control["call"] = rng.choice([INIT, SPLIT, QUERY], len(control))
    control["handle"], control["parent"] = rng.integers(1, 9, len(control)), rng.integers(1, 9, len(control))
    control["color"], control["key"] = rng.integers(0, 2, len(control)), rng.integers(-2, 2, len(control))
    control["ts_ns"], control["nranks"] = rng.integers(0, 99, len(control)), rng.choice([-1, 2, 4, 8], len(control))
    control["rank"], control["data"][:, 0] = rank, rng.integers(0, 2, len(control))
    waits = np.sort(rng.integers(1, 1000, int(rng.integers(0, 60)))) * MS
    return RankCalls(
        rank, rows, waits, rng.integers(-1, 9, len(waits)) * MS, control,
        clock_ns=int(rng.integers(0, 3)) * MS,
        named={int(comm): Membership(str(rng.integers(2)), rank, 4, turn) for turn, comm
               in enumerate(rng.permutation(comms)[: int(rng.integers(0, comms + 1))] + 1)},
        in_memory={comm: Place(int(rng.integers(3)), rank, 4) for comm in range(1, int(rng.integers(1, 4)))},
        ends=rows["ts_ns"].astype(np.int64) + 500 if rng.integers(2) else None,
    )  # fmt: skip


def test_calls_are_sorted_into_communicators_and_groups_as_by_looking_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "RECENT", 30)
    rng = np.random.default_rng(4)
    for _ in range(300):
        calls = some_calls(rng, 0)
        lives = finished(communicators._lives(calls))
        assert [
            (place, life.comm, life.begin, life.end, life.counts.tolist(), life.ts.tolist(), life.seq.tolist())
            for place, life in lives
        ] == plain_lives(calls)
        traffic = finished(communicators._traffic(calls))
        assert [
            (each.comm, *(column.tolist() for column in (each.codes, each.seq, each.ts, each.end, each.blocked)))
            for each in traffic
        ] == plain_traffic(calls)


def test_the_size_that_some_ranks_asked_for_is_taken_as_by_comparing_all_with_all() -> None:
    rng = np.random.default_rng(5)
    for _ in range(500):
        keys = [(int(rng.integers(3)), int(rng.choice([-2, -1, 0, 1, 2, 8]))) for _ in range(6)]
        by_signature: dict[tuple[int, int], list[Any]] = {key: [place] for place, key in enumerate(keys)}
        plain = {key: list(members) for key, members in by_signature.items()}
        for (signature, size), members in list(plain.items()):
            others = [other for its, other in plain if its == signature and other > 0]
            if size < 0 and len(others) == 1:
                plain[signature, others[0]] += members
                del plain[signature, size]
        assert list(communicators._by_one_size(by_signature).items()) == list(plain.items())


def test_the_size_of_the_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of jobs of all kinds, in parts of a few and in one."""
    rng = np.random.default_rng(6)
    joined: Counter[str] = Counter()
    for _ in range(100):
        ranks = [some_calls(rng, rank) for rank in range(int(rng.integers(1, 5)))]
        found = []
        for portion, pairs, cells in ((3, 2, 10), (1 << 40, 1 << 40, 1 << 40)):
            for name, size in (("PORTION", portion), ("PAIRS", pairs), ("CELLS", cells)):
                monkeypatch.setattr(communicators, name, size)
            found.append(find_groups(ranks))
        assert np.array_equal(*found)
        keys = list(zip(found[0]["rank"].tolist(), found[0]["comm"].tolist(), strict=True))
        assert keys == sorted(set(keys))
        joined.update(found[0]["joined_by"].tolist())
    assert set(joined) >= {"unique_id", "split", "name", "memory", "traffic"}
