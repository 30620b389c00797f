"""Jobs of several hosts in a store: clocks that differ, steps numbered apart, communicators known by traffic."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from argus.diagnose.read import queries
from argus.diagnose.read.hosts import (
    ALIKE_NS,
    ALL,
    MAX_CALLS,
    MAX_MINUTES,
    MIN_MINUTES,
    Hosts,
    _connecting,
    _Extent,
    _impossible,
    _Local,
    _match,
    _met,
    _rough,
    _shifts,
    align_hosts,
    store_hosts,
)
from argus.diagnose.read.query import across, of_job, runnable_sql
from argus.diagnose.run import diagnose
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict
from argus.importers.recordings.clocks import AGREE_NS
from argus.model.errors import ArgusError
from argus.model.records import COLLECTIVE
from argus.semantics.groups.clocks import CALL, convert, error_at, likely
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from tests.builders.hosts_job import World, store_world
from tests.builders.stored_job import WALL, store_job
from tests.builders.synthetic_job import MS, simulate
from tests.stores import new_store

US = 1_000
SHIFTS = "SELECT host, shift, how, confidence, error FROM step_shifts"
Diagnosed = Callable[[str], Verdict]
Aligned = Callable[[str], Hosts]
BIG = ((1_000_000, 20.0), (2_000_000, 20.0))
WORLDS = {
    "healthy": World(),
    "slow": World(slow={6: 1.8}),
    "slow on the first": World(slow={1: 1.8}),
    "late": World(attach_ms=(0, 900, 0), slow={6: 1.8}),
    "late healthy": World(attach_ms=(0, 900, 0)),
    "all late": World(attach_ms=(300, 900, 0), made=False, slow={1: 1.8}),
    "three": World(hosts=3, per_host=2, attach_ms=(300, 900, 1300), made=False, slow={3: 1.8}, local=True),
    "three healthy": World(hosts=3, per_host=2, attach_ms=(300, 900, 1300), made=False, local=True),
    "one of three late": World(hosts=3, per_host=2, attach_ms=(0, 0, 700), slow={4: 1.8}),
    "three from the start": World(hosts=3, per_host=3, slow={7: 1.6}),
    "sharded": World(sharded=True, local=True, slow={6: 1.8}),
    "one rank a host": World(per_host=1, hosts=3, attach_ms=(0, 500, 900), made=False, slow={2: 1.8}),
    "a slow host": World(slow=dict.fromkeys((4, 5, 6, 7), 1.8)),
    "small lateness": World(slow=dict.fromkeys((4, 5, 6, 7), 1.25)),
    "blurred lateness": World(slow=dict.fromkeys((4, 5, 6, 7), 1.25), sizes=BIG),
    "no gpu times": World(gpu=False),
    "no gpu times, slow": World(gpu=False, slow={6: 1.8}),
    "ntp": World(gpu=False, offset_ms=(0.0, 0.6, 0.0), drift_ppm=(0.0, 0.0, 0.0), wall_error_ms=1.0),
    "ntp, slow": World(
        gpu=False, offset_ms=(0.0, 0.6, 0.0), drift_ppm=(0.0, 0.0, 0.0), wall_error_ms=1.0, slow={4: 1.8}
    ),
    "minutes": World(
        forward_ms=1500, slow={6: 1.8}, local=True, sizes=((1_000_000, 0.03), (2_000_000, 0.03), (1, 0.03))
    ),
    "no company": World(attach_ms=(300, 900, 0), made=False, gpu=False, local=True),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(new_store(tmp_path_factory.mktemp("hosts"))) as opened:
        for name, world in WORLDS.items():
            store_world(opened, name, world)
        store_job(opened, "one host", simulate(4, 30))
        yield opened


@pytest.fixture(scope="module")
def diagnosed(store: Store) -> Diagnosed:
    """Verdicts: each world is diagnosed once, and what that stores is there for whoever asks next."""
    return cache(lambda name: diagnose_store(store, name, 1))


@pytest.fixture(scope="module")
def aligned(store: Store) -> Aligned:
    """How the hosts of a world go together: it is worked out once, and nothing of it is stored."""

    def align(name: str) -> Hosts:
        hosts = align_hosts(partial(query_columns, store), name, 1)
        assert hosts is not None
        hosts.clocks.setflags(write=False)
        return hosts

    return cache(align)


def asked(store: Store, text: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return query_columns(store, text, params or {})


# ---- the verdict


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("slow", [6]),
        ("slow on the first", [1]),
        ("late", [6]),
        ("all late", [1]),
        ("three", [3]),
        ("one of three late", [4]),
        ("three from the start", [7]),
        ("sharded", [6]),
        ("one rank a host", [2]),
        ("a slow host", [4, 5, 6, 7]),
        ("small lateness", [4, 5, 6, 7]),
        ("ntp, slow", [4]),
    ],
)
def test_the_slow_rank_is_named_whatever_the_clocks_say(diagnosed: Diagnosed, name: str, ranks: list[int]) -> None:
    verdict = diagnosed(name)
    assert verdict["status"] == "degraded"
    assert [finding["ranks"] for finding in verdict["findings"]] == [ranks], verdict
    world = WORLDS[name]
    assert verdict["ranks"] == world.per_host * world.hosts
    assert verdict["findings"][0]["hosts"] == list(dict.fromkeys(f"node-{rank // world.per_host}" for rank in ranks))
    texts = [evidence["text"] for evidence in verdict["findings"][0]["evidence"]]
    assert any(text.startswith("clocks of node-") and " agree to " in text for text in texts), texts


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("name", ["healthy", "late healthy", "three healthy", "ntp"])
def test_a_healthy_job_stays_healthy(diagnosed: Diagnosed, name: str) -> None:
    verdict = diagnosed(name)
    assert verdict["status"] == "healthy", verdict
    assert "agree to" in verdict["reason"]


def test_without_the_correction_the_wrong_ranks_are_blamed(store: Store) -> None:
    """7 ms of offset make node-1 look late, and steps of hosts attached apart are not the same."""
    query = partial(query_columns, store)

    def uncorrected(name: str) -> list[list[int]]:
        return [finding["ranks"] for finding in diagnose(query, name, 1)["findings"]]

    assert uncorrected("healthy") == [[4, 5, 6, 7]]
    assert uncorrected("slow") != [[6]]
    assert uncorrected("one rank a host") == []


@pytest.mark.thorough
def test_lateness_below_the_error_is_not_raised(diagnosed: Diagnosed) -> None:
    """Where the shortest collective takes 20 ms, the clocks cannot be known better. With a short one they can."""
    verdict = diagnosed("blurred lateness")
    assert verdict["status"] == "inconclusive"
    assert not verdict["findings"]
    assert "after everybody else, less than the clocks of the hosts may differ by" in verdict["reason"]
    assert diagnosed("small lateness")["status"] == "degraded"


@pytest.mark.thorough
def test_without_clocks_ranks_are_compared_within_a_host(diagnosed: Diagnosed) -> None:
    healthy = diagnosed("no gpu times")
    assert healthy["status"] == "inconclusive"
    assert "agree only to" in healthy["reason"]
    slow = diagnosed("no gpu times, slow")
    assert [finding["ranks"] for finding in slow["findings"]] == [[6]]
    assert not any("agree to" in evidence["text"] for evidence in slow["findings"][0]["evidence"])


def test_hosts_that_nothing_joins_are_left_out_and_reported(store: Store, diagnosed: Diagnosed) -> None:
    verdict = diagnosed("no company")
    assert verdict["status"] == "inconclusive"
    assert "the steps of node-1 were left out" in verdict["reason"]
    assert "the clock of node-1 could not be compared" in verdict["reason"]
    errors = asked(store, "SELECT host, error FROM group_joins WHERE job = 'no company' AND error != ''")
    assert set(errors["host"]) == {"node-1"}
    assert any("several communicators have equal calls" in error for error in errors["error"])


# ---- what is stored


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("name", ["healthy", "slow", "late", "all late", "three", "sharded", "one rank a host", "ntp"])
def test_the_stored_clocks_are_right(store: Store, diagnosed: Diagnosed, name: str) -> None:
    world = WORLDS[name]
    diagnosed(name)
    rows = asked(store, queries.CLOCKS, {"job": name, "run": 1})
    assert set(rows["host"]) == {f"node-{host}" for host in range(world.hosts)}
    for i, host in enumerate(rows["host"]):
        number = int(host[-1])
        if number == 0:
            assert (rows["offset_ns"][i], rows["error_ns"][i]) == (0, 0)
            continue
        # `at` is the host's own time, of which the offset is a function.
        own = int(rows["at"][i]) - WALL
        rate, base_rate = 1 + world.drift_ppm[number] * 1e-6, 1 + world.drift_ppm[0] * 1e-6
        t = (own - world.offset_ms[number] * MS) / rate
        true = t * base_rate + world.offset_ms[0] * MS - own
        assert abs(rows["offset_ns"][i] - true) <= rows["error_ns"][i]
        assert rows["error_ns"][i] < (100 * US if world.gpu else 3 * MS)


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("name", ["slow", "late", "all late", "three", "sharded", "one rank a host", "no gpu times"])
def test_one_step_has_one_number_on_all_hosts(store: Store, diagnosed: Diagnosed, name: str) -> None:
    world = WORLDS[name]
    diagnosed(name)
    rows = asked(
        store,
        "SELECT step, host, toInt64(min(toUnixTimestamp64Nano(ts))) AS ts FROM iterations_across "
        f"WHERE job = '{name}' GROUP BY step, host ORDER BY step",
    )
    number = np.array([int(host[-1]) for host in rows["host"]])
    drift, offset = np.array(world.drift_ppm)[number] * 1e-6, np.array(world.offset_ms)[number] * MS
    true = ((rows["ts"] - WALL) - offset) / (1 + drift)
    steps = rows["step"]
    common = [step for step in np.unique(steps) if len(set(number[steps == step])) == world.hosts]
    assert len(common) > 40
    begins = [true[steps == step] for step in common]
    usual = float(np.median(np.diff([begin.mean() for begin in begins])))
    assert max(np.ptp(begin) for begin in begins) < usual / 3
    assert int(steps.min()) == 0


@pytest.mark.thorough
def test_communicators_within_hosts_are_not_joined(store: Store, diagnosed: Diagnosed) -> None:
    """All hosts make the same calls on them, and at nearly the same time."""
    diagnosed("three healthy")
    rows = asked(
        store,
        "SELECT joined_group, uniqExact(host) AS hosts FROM group_joins "
        "WHERE job = 'three healthy' AND joined_group != 0 GROUP BY joined_group ORDER BY hosts",
    )
    assert rows["hosts"].tolist() == [1, 3]


def test_hosts_attached_later_are_shifted(store: Store, diagnosed: Diagnosed) -> None:
    diagnosed("late")
    rows = asked(store, f"{SHIFTS} WHERE job = 'late' ORDER BY version DESC, host LIMIT 2")
    assert rows["how"].tolist() == ["reference", "calls"]
    assert rows["shift"].tolist() == [0, 6]
    assert rows["confidence"].min() >= 0.9


@pytest.mark.thorough
def test_a_diagnosis_that_finds_the_same_stores_nothing_anew(
    store: Store, diagnosed: Diagnosed, aligned: Aligned
) -> None:
    diagnosed("three healthy")
    count = "SELECT uniqExact(version) AS n, count() AS all FROM {} WHERE job = 'three healthy'"
    tables = ("clocks", "step_shifts", "group_joins")
    before = [asked(store, count.format(table)) for table in tables]
    assert [int(rows["n"][0]) for rows in before] == [1, 1, 1]
    diagnose_store(store, "three healthy", 1)
    assert [asked(store, count.format(table)) for table in tables] == before
    hosts = aligned("three healthy")
    # Another estimate is stored, and so is the first one when it is found again.
    other = replace(hosts, shifts=(*hosts.shifts[:-1], replace(hosts.shifts[-1], confidence=0.5)))
    for versions, estimate in ((2, other), (3, hosts)):
        store_hosts(store, estimate, "three healthy", 1)
        assert [int(asked(store, count.format(table))["n"][0]) for table in tables] == [versions] * 3


@pytest.mark.thorough
def test_the_newest_estimate_counts(store: Store, diagnosed: Diagnosed, aligned: Aligned) -> None:
    hosts = aligned("three from the start")
    wrong = replace(hosts, clocks=hosts.clocks.copy())
    wrong.clocks["offset_ns"][1] += 500 * MS
    latest = "SELECT max(later_ns) AS ns FROM collectives_across WHERE job = 'three from the start' AND aligned"
    store_hosts(store, wrong, "three from the start", 1)
    assert asked(store, latest)["ns"][0] > 400 * MS
    store_hosts(store, hosts, "three from the start", 1)
    assert asked(store, latest)["ns"][0] < 100 * MS
    diagnosed("healthy")
    diagnose_store(store, "healthy", 1)
    once = asked(store, "SELECT count() AS n FROM iterations WHERE job = 'healthy'")["n"]
    assert asked(store, "SELECT count() AS n FROM iterations_across WHERE job = 'healthy'")["n"] == once
    calls = "SELECT count() AS n FROM {} WHERE job = 'healthy'"
    before, after = (asked(store, calls.format(t))["n"] for t in ("collectives", "collectives_across"))
    assert before == after


def test_the_view_never_shows_lateness_below_the_error(store: Store, diagnosed: Diagnosed) -> None:
    diagnosed("healthy")
    late = "SELECT host, lateness_ns FROM {} WHERE job = 'healthy' AND aligned"
    raw = asked(store, late.format("collectives_aligned"))
    on_node_1 = raw["host"] == "node-1"
    assert np.median(raw["lateness_ns"][on_node_1]) > 6 * MS
    rows = asked(
        store,
        "SELECT host, first_host, lateness_ns, later_ns, clock_error_ns + first_error_ns AS error_ns "
        "FROM collectives_across WHERE job = 'healthy' AND aligned",
    )
    assert np.median(rows["lateness_ns"]) < 2 * MS
    across = rows["host"] != rows["first_host"]
    below = across & (rows["later_ns"] <= rows["error_ns"])
    assert below.any()
    assert (rows["lateness_ns"][below] == 0).all()
    assert (rows["lateness_ns"][~below] == rows["later_ns"][~below]).all()
    assert (rows["lateness_ns"] >= 0).all()


# ---- stores that take nothing


@pytest.mark.thorough
def test_queries_with_the_estimates_in_them_answer_the_same(store: Store, aligned: Aligned) -> None:
    query = partial(query_columns, store)
    given = aligned("late")
    stored = store_hosts(store, given, "late", 1)
    assert (given.params()["across"], stored.params()["across"]) == ("given", "stored")
    common = {
        "job": "late",
        "run": 1,
        "first": 0,
        "last": 100,
        "ranks": [6],
        "onset": 20,
        "since_ns": 0,
        "group": 0,
        "seq": 0,
        "left_out": [],
        "members": list(range(8)),
        "steps": [1, 2],
        "kernel": 1,
        "width": 1,
    }
    run = of_job(query)
    for text in (
        queries.LATENESS,
        queries.LEAD,
        queries.LAST,
        queries.STEPS,
        queries.CPU_TIME,
        queries.PHASE_TIME,
        queries.LOADING,
        queries.LAST_CALLS,
        queries.SPAN,
        queries.SLOWER,
        queries.CLOCKS,
        queries.STUCK_CALL,
        queries.SPAN_NS,
        queries.LAST_TRANSFERS,
        queries.GPU_TIMES,
        queries.GPU_COMPUTE,
        queries.TRANSFERS,
        queries.TRANSFER_RANKS,
        queries.WORK,
        queries.ISSUE,
        queries.PATTERNS,
        queries.KERNEL_STEPS,
    ):
        a, b = (run(text, {**common, **hosts.params()}) for hosts in (given, stored))
        assert len(next(iter(a.values()))) > 0 or text in (
            queries.PHASE_TIME,
            queries.LOADING,
            queries.LAST_TRANSFERS,
            queries.GPU_TIMES,
            queries.GPU_COMPUTE,
            queries.TRANSFERS,
            queries.TRANSFER_RANKS,
            queries.ISSUE,
            queries.PATTERNS,
            queries.KERNEL_STEPS,
        )
        # What a verdict cites can be pasted.
        c, d = (query(runnable_sql(text, {**common, **hosts.params()}), {}) for hosts in (given, stored))
        for name in a:
            assert sorted(map(str, a[name].tolist())) == sorted(map(str, b[name].tolist())), (name, text)
            assert sorted(map(str, a[name].tolist())) == sorted(map(str, c[name].tolist())), (name, text)
            assert sorted(map(str, a[name].tolist())) == sorted(map(str, d[name].tolist())), (name, text)


@pytest.mark.parametrize("text", [queries.STEPS, queries.CPU_TIME, queries.WORK])
def test_hosts_whose_steps_are_numbered_otherwise_are_read_where_they_are(
    store: Store, aligned: Aligned, text: str
) -> None:
    query = partial(query_columns, store)
    hosts = store_hosts(store, aligned("late"), "late", 1)
    assert [shift.shift for shift in hosts.shifts] == [0, 6]
    ranks = [int(rank) for rank in query(queries.HOSTS, {"job": "late", "run": 1})["rank"]]
    params = {"job": "late", "run": 1, "first": 10, "last": 14, "ranks": ranks, **hosts.params()}
    near = of_job(query)(text, params)
    whole, times = re.subn(r" AND host_step BETWEEN .*? AND \{last:UInt32\}", "", across(text, "stored"))
    assert times
    every = query(whole, {name: value for name, value in params.items() if name != "across"})
    assert len(every["step"])
    for name, values in every.items():
        np.testing.assert_array_equal(near[name], values, name)


def test_the_first_and_the_last_step_are_found_whatever_the_shifts(store: Store, aligned: Aligned) -> None:
    query = partial(query_columns, store)
    hosts = aligned("late")
    shifts = {"node-0": 0, "node-1": 20}
    hosts = replace(hosts, shifts=tuple(replace(one, shift=shifts[name])
                                        for name, one in zip(hosts.names, hosts.shifts, strict=True)))  # fmt: skip
    rows = asked(store, "SELECT host, step, ts FROM iterations WHERE job = 'late' ORDER BY ts")
    number = rows["step"].astype(int) + np.array([shifts[host] for host in rows["host"]])
    for since_ns in (0, int(rows["ts"][len(number) // 2])):
        later = number[rows["ts"] >= since_ns]
        span = of_job(query)(queries.SPAN, {"job": "late", "run": 1, "since_ns": since_ns, **hosts.params()})
        assert (int(span["first"][0]), int(span["last"][0])) == (later.min(), later.max())
        assert int(span["n"][0])
        # Neither is the first or the last that a host has itself.
        assert later.max() > rows["step"].max()
    assert later.min() > rows["step"][rows["ts"] >= since_ns].min()


@pytest.mark.thorough
def test_a_store_that_may_only_be_read_is_diagnosed_all_the_same(
    store: Store, diagnosed: Diagnosed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(verdict: Verdict) -> list[Any]:
        return [(f["kind"], f["ranks"], f["slowdown"], [e["text"] for e in f["evidence"]]) for f in verdict["findings"]]

    usual = diagnosed("one of three late")

    def refuse(*_: object, **__: object) -> None:
        raise ArgusError("argus: Not enough privileges", "")

    with store.lease() as client:
        # What is stored already is not stored again; and of other jobs it is there for other tests.
        client.command("DELETE FROM clocks WHERE job = 'one of three late'")
    monkeypatch.setattr(Store, "insert", refuse)
    verdict = diagnose_store(store, "one of three late", 1)
    assert findings(verdict) == findings(usual)
    assert "could not be stored: argus: Not enough privileges" in verdict["reason"]
    assert "WITH" in verdict["findings"][0]["evidence"][0]["sql"]


# ---- jobs of which a part is read


def _true(world: World, host: int, own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the reference shows when a host shows ``own``, ns."""
    t = (own - WALL - world.offset_ms[host] * MS) / (1 + world.drift_ppm[host] * 1e-6)
    return np.asarray(WALL + t * (1 + world.drift_ppm[0] * 1e-6) + world.offset_ms[0] * MS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["minutes", "sharded", "late", "three from the start"])
def test_a_part_of_the_calls_shows_as_much(
    store: Store, aligned: Aligned, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some communicators, some of their calls, and of a long run some minutes."""
    query, asked_for = partial(query_columns, store), dict[str, list[Mapping[str, Any]]]()

    def noted(text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if "strides" in params:
            asked_for.setdefault(text, []).append(params)
        return query(text, params)

    whole = aligned(name)
    for constant in ("MAX_ROWS", "MAX_CALLS"):
        monkeypatch.setattr(f"argus.diagnose.read.hosts.{constant}", 0)
    some = align_hosts(noted, name, 1)
    assert some is not None
    glance, calls = asked_for[across(queries.GPU_CALLS, "given")]
    (steps,) = asked_for[across(queries.STEPS_OF_CALLS, "given")]
    assert len(glance["minutes"]) == 1
    assert (glance["members"], calls["members"]) == (1, ALL)
    assert len(calls["groups"]) == 1
    if name == "minutes":
        assert len(steps["minutes"]) < len(calls["minutes"]) < (whole.clocks["at_ns"].max() - WALL) / 60e9 + 3
    assert [shift.shift for shift in some.shifts] == [shift.shift for shift in whole.shifts]
    assert [shift.error for shift in some.shifts] == [""] * len(some.shifts)
    world = WORLDS[name]
    begin = int(asked(store, f"SELECT min(ts) AS ns FROM iterations WHERE job = '{name}'")["ns"][0])
    end = int(asked(store, f"SELECT max(ts) AS ns FROM iterations WHERE job = '{name}'")["ns"][0])
    for host in range(1, world.hosts):
        own = some.clocks[some.clocks["host"] == host]
        if name == "minutes":
            assert len(own) > sum(begin / 1e9 - 60 < minute < end / 1e9 for minute in calls["minutes"])  # chords, too
        times = np.linspace(begin, end, 200).astype(np.int64)
        wrong = np.abs(convert(times, own) - _true(world, host, times))
        assert (wrong <= error_at(times, own) + 1).all()
        # A minute has some 30 calls, here and there.
        assert error_at(times, own).max() < (100 * US if name != "minutes" else MS)
    verdict = diagnose(query, name, 1, across=store_hosts(store, some, name, 1))
    assert [f["ranks"] for f in verdict["findings"]] == [list(world.slow)]


@pytest.fixture
def timed(store: Store, aligned: Aligned, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A job of which a part is read, and whose GPUs show that one communicator is quicker than all others. Of each host
    the later ranks come last, and rank 7, which is slow; of rank 0 that is not known."""
    store_hosts(store, aligned("three from the start"), "three from the start", 1)
    for constant in ("MAX_ROWS", "MAX_CALLS"):
        monkeypatch.setattr(f"argus.diagnose.read.hosts.{constant}", 0)
    params = {"job": "three from the start", "run": 1, "across": "stored"}
    quick = int(of_job(partial(query_columns, store))(queries.SPANNING, params)["comm_group"][-1])
    with store.lease() as client:
        client.command(
            "INSERT INTO gpu_collectives (job, run, rank, step, ts, comm, op, calls, duration_ns, shortest_ns) "
            "SELECT i.job, i.run, i.rank, i.step, i.ts, c.comm, 'AllReduce', 1, 9000000, "
            f"if(c.comm_group = {quick}, 30000 + if(i.rank = 7, 0, 9 - i.rank), 9000000) "
            "FROM iterations AS i INNER JOIN (SELECT * FROM communicators FINAL) AS c "
            "ON i.job = c.job AND i.run = c.run AND i.rank = c.rank "
            "WHERE i.job = 'three from the start' AND i.rank != 0"
        )
        yield quick
        client.command("TRUNCATE TABLE gpu_collectives")


def test_the_gpus_show_which_communicators_are_looked_at(store: Store, timed: int) -> None:
    """And which ranks of each host the others wait for."""
    asked_for: list[Mapping[str, Any]] = []

    def noted(text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if text == across(queries.GPU_CALLS, "given"):
            asked_for.append(params)
        return query_columns(store, text, params)

    hosts = align_hosts(noted, "three from the start", 1)
    assert hosts is not None
    (params,) = asked_for
    assert params["groups"] == [timed]
    assert params["chosen"] == [0, 2, 4, 5, 7, 8]
    assert 0 < hosts.clocks["error_ns"].max() < 100 * US


def test_communicators_that_turn_out_to_show_nothing_are_chosen_anew(store: Store, timed: int) -> None:
    asked_for: list[int] = []

    def without(text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        found = query_columns(store, text, params)
        if text == across(queries.GPU_CALLS, "given"):
            asked_for.append(params["members"])
            if len(asked_for) == 1:
                return {name: values[:0] for name, values in found.items()}
        return found

    hosts = align_hosts(without, "three from the start", 1)
    assert hosts is not None
    assert asked_for == [ALL, 1, ALL]
    assert 0 < hosts.clocks["error_ns"].max() < 100 * US


def test_the_way_of_least_time_is_likely_the_best() -> None:
    assert likely({5: ([0, 1, 2], 90.0), 6: ([0, 1], 10.0), 7: ([1, 2], 20.0), 8: ([2, 3], 500.0)}) == [6, 7, 8]
    assert likely({5: ([0, 1, 2], 90.0), 6: ([0, 1], 10.0), 7: ([1, 2], 85.0)}) == [5, 6]


def test_where_those_minutes_have_nothing_in_common_all_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks may be minutes apart."""
    monkeypatch.setattr("argus.diagnose.read.hosts._Extent.minutes_read", lambda self: self.minutes[-1:])
    hosts = align_hosts(partial(query_columns, store), "minutes", 1)
    assert hosts is not None
    assert [shift.error for shift in hosts.shifts] == ["", ""]
    assert (hosts.clocks["error_ns"] >= 0).all()


def test_which_minutes_are_looked_at() -> None:
    minutes = tuple(range(0, 6000, 60))
    assert _Extent(minutes, 60, 5820, MAX_CALLS / 2).minutes_read() == minutes
    some = _Extent(minutes, 60, 5820, 12.5 * MAX_CALLS).minutes_read()
    assert list(some) == sorted(set(some))
    assert some[0] == 60
    assert some[-6:] == minutes[-6:]
    assert len(some) == 10
    assert len(_Extent(minutes, 60, 5820, 1e12).minutes_read()) == MIN_MINUTES + 2
    long = tuple(range(0, 600_000, 60))
    assert len(_Extent(long, 60, 60, 1.0).minutes_read()) == MAX_MINUTES + 2


def test_communicators_that_connect_all_hosts_are_kept() -> None:
    groups, hosts = [5, 6, 7, 8], [[0, 1], [1, 2], [0, 1, 2], [2, 3]]
    assert _connecting(groups, hosts, []) == [2, 3]
    assert _connecting(groups, hosts, [5, 6]) == [0, 1, 3]
    assert _connecting(groups, hosts, [5, 6, 7]) == [0, 1, 2, 3]


# ---- jobs of one host


def test_one_host_costs_one_query(store: Store) -> None:
    texts: list[str] = []

    def counted(text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        texts.append(text)
        return query_columns(store, text, params)

    assert align_hosts(counted, "one host", 1) is None
    assert texts == [queries.SEVERAL]


def test_times_that_are_not_of_clocks_are_taken_as_they_are(store: Store) -> None:
    """Imported and simulated jobs have no offset of a monotonic clock."""
    assert int(asked(store, queries.SEVERAL, {"job": "three", "run": 1})["hosts"][0]) == 3
    assert int(asked(store, queries.SEVERAL, {"job": "one host", "run": 1})["hosts"][0]) == 0


# ---- parts


def steps_of(*rows: tuple[str, int, int]) -> dict[str, Any]:
    host, seq, step = zip(*rows, strict=True)
    place = np.array(["abc".index(one) for one in host])
    return {"host": place, "comm_group": np.full(len(seq), 1, np.uint64), "aligned_seq": np.array(seq),
            "step": np.array(step)}  # fmt: skip


def test_steps_that_do_not_agree_are_reported() -> None:
    a = [("a", n, n // 2) for n in range(40)]
    shifted = [("b", n, n // 2 - 3) for n in range(6, 40)]
    out = _shifts(steps_of(*a, *shifted), ["a", "b"])
    assert [(s.shift, s.how, s.error) for s in out] == [(0, "reference", ""), (3, "calls", "")]
    torn = [("b", n, n // 2 - 3 - (n > 20)) for n in range(6, 40)]
    out = _shifts(steps_of(*a, *torn), ["a", "b"])
    assert "do not agree how its steps line up with those of a" in out[1].error
    stray = [("b", n, n // 2 - 3 - (n == 20)) for n in range(6, 40)]
    assert _shifts(steps_of(*a, *stray), ["a", "b"])[1].shift == 3
    few = _shifts(steps_of(*a, *shifted[:7]), ["a", "b"])
    assert few[1].error == "only 7 collectives are in steps of it and of a"
    assert _shifts(None, ["a", "b"])[1].error.startswith("no collective is known")


def test_shifts_go_through_other_hosts_and_begin_at_0() -> None:
    a = [("a", n, n + 5) for n in range(20)]
    ab = steps_of(*a, *(("b", n, n) for n in range(20)))
    bc = steps_of(*(("b", n, n) for n in range(20)), *(("c", n, n + 9) for n in range(20)))
    bc["comm_group"] += np.uint64(1)
    rows = {name: np.concatenate([ab[name], bc[name]]) for name in ab}
    assert [s.shift for s in _shifts(rows, ["a", "b", "c"])] == [4, 9, 0]


def test_a_group_whose_ranks_leave_before_all_have_entered_is_none() -> None:
    calls = np.zeros(200, CALL)
    calls["group"] = np.repeat([1, 2], 100)
    calls["end_ns"] = 10
    calls["entry_ns"][100:110] = 20
    assert _impossible(calls).tolist() == [2]
    calls["entry_ns"][104:110] = 0
    assert _impossible(calls).tolist() == []


def test_ranks_of_a_host_whose_clocks_differ_a_little_met_all_the_same() -> None:
    """Of recordings: an all-reduce of 19 us, of two ranks whose clocks are 30 us apart."""
    calls = np.zeros(3, CALL)
    calls["entry_ns"], calls["end_ns"], calls["took_ns"] = [40_000, 90_000, 5_000], 10_000, 19_000
    met = _met(calls.copy(), ALIKE_NS)
    assert met["entry_ns"].tolist() == [10_000, 90_000, 5_000]
    assert met["took_ns"].tolist() == [30_000, 19_000, 19_000]
    assert met["end_ns"].tolist() == [10_000] * 3
    assert (_met(calls.copy(), 0) == calls).all()
    assert ALIKE_NS == AGREE_NS


def test_of_several_equal_communicators_none_is_guessed() -> None:
    """Two on each host, whose calls are equal and whose ends are not known: only one of each would be clear."""
    rows = np.zeros(90, COLLECTIVE)
    rows["seq"], rows["count"] = np.arange(90), 5 + np.arange(90) % 3
    rows["ts_ns"] = 10**9 + np.arange(90) // 3 * 100 * MS + np.arange(90) % 3 * 9 * MS
    none = np.empty(0, np.int64)
    unknown = np.full(90, -1, np.int64)
    base, own = (
        [_Local(f"node-{h}", 10 * h + i, 4 * h + i, False, -1, 1, rows, none, none, unknown, unknown) for i in range(2)]
        for h in range(2)
    )
    assert [join.error for join in _match(base[:1], own[:1], 100.0 * MS, alone=True)] == [""]
    assert all("several communicators" in join.error for join in _match(base, own, 100.0 * MS, alone=True))
    assert "several communicators" in _match(base[:1], own[:1], 100.0 * MS, alone=False)[0].error


def test_a_rough_clock_is_where_most_ends_coincide() -> None:
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(5 * MS, 60 * MS, 300))
    for offset in (-12 * MS, 0, 3 * MS):
        other = ends - offset + rng.integers(0, 100 * US, 300)
        assert abs(_rough(ends, other, 20 * MS) - offset) < BINS
    assert _rough(ends, np.empty(0, np.int64), 20 * MS) == 0


BINS = 200 * US


def test_clocks_that_are_too_inexact_are_not_used(store: Store, aligned: Aligned) -> None:
    """50 ms of offset that may be 200 ms off would make every rank of node-1 late; unknown ones count as little."""
    query = partial(query_columns, store)
    hosts = aligned("healthy")
    for error, least, most in ((200 * MS, 0, 5), (-1, 0, 5), (10_000, 45, 55)):
        clocks = hosts.clocks.copy()
        clocks["offset_ns"][1] += 50 * MS
        clocks["error_ns"][1] = error
        other = replace(hosts, clocks=clocks)
        params = {"job": "healthy", "run": 1, "first": 0, "last": 100, "left_out": [], **other.params()}
        late = of_job(query)(queries.LATENESS, params)
        assert set(late["rank"]) == set(range(8))
        assert least * MS <= late["peak_ns"].max() <= most * MS
        assert len(np.unique(late["comm_group"])) == (1 if error == 10_000 else 2)
        assert other.between(["node-1"], ["node-0"]) == (10_000 if error == 10_000 else 0)


def test_a_query_holds_no_more_clocks_than_it_can_carry(aligned: Aligned, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = aligned("healthy")
    more = replace(hosts, clocks=np.repeat(hosts.clocks, [1, 9]))
    more.clocks["since_ns"][1:] = np.arange(9) * 1000
    more.clocks["drift_ppb"][1:] = np.arange(9)
    monkeypatch.setattr("argus.diagnose.read.hosts.MAX_GIVEN", 6)
    given = more.params()
    assert given["clock_host"] == ["node-0", "node-1", "node-1", "node-1"]
    assert given["clock_drift"][1:] == [6, 7, 8]
    assert given["clock_ts"] == [0, 0, 7000, 8000]


def test_the_words(aligned: Aligned) -> None:
    hosts = aligned("healthy")
    assert hosts.between(["node-0"], ["node-0"]) == 0
    assert 0 < hosts.between(["node-0"], ["node-0", "node-1"]) == hosts.worst_ns < 100 * US
    assert hosts.trouble(10 * MS) == ""
    assert "agree only to" in hosts.trouble(1000.0)


def test_a_recording_that_begins_in_1970_has_no_minutes_before() -> None:
    """Profilers' times may count from the start of the program, or of the machine."""
    columns = {"first_s": [0], "last_s": [75], "steps": [10], "calls": [2.0]}
    rows = {name: np.array(values) for name, values in columns.items()}
    extent = _Extent.of(lambda sql, params: rows, {})
    assert extent.minutes == (0, 60, 120, 180)
    assert (extent.first, extent.last) == (0, 0)
