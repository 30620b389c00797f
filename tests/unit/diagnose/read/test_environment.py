"""The environment of runs, as it is stored: in common, different between ranks, changed between runs."""

from __future__ import annotations

from functools import partial

import numpy as np

from argus.diagnose.read.environment import Environment, environment_changes, read_environment
from argus.model.environment import digest
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer


def put(store: Store, run: int, facts: list[dict[str, str]]) -> None:
    """Stores a run, a process a rank."""
    writer = Writer(store, source="test")
    writer.append(
        "environments",
        {
            "job": "job", "run": run, "rank": np.arange(len(facts), dtype=np.uint32), "host": "node", "pid": 1,
            "ts": np.zeros(len(facts), np.int64), "facts": facts, "version": 1,
            "digest": np.array([digest(one) for one in facts], np.uint64),
        },
    )  # fmt: skip
    assert writer.flush(20)
    writer.close()


def test_common_different_and_changed(store: Store) -> None:
    put(
        store,
        1,
        [{"torch.version": "2.9", "env.NCCL_ALGO": "Ring", "host.boot": "a", "numa.cpus": str(n)} for n in range(3)],
    )
    put(
        store,
        2,
        [
            {
                "torch.version": "2.10",
                "host.boot": "b",
                "numa.cpus": "0",
                "cpu.governor": "powersave" if n == 2 else "performance",
            }
            for n in range(3)
        ],
    )
    query = partial(query_columns, store)
    before, after = read_environment(query, "job", 1), read_environment(query, "job", 2)
    assert before.facts == {"env.NCCL_ALGO": "Ring", "host.boot": "a", "torch.version": "2.9"}
    assert before.differing == {"numa.cpus": {"0": [0], "1": [1], "2": [2]}}
    assert after.differing == {"cpu.governor": {"performance": [0, 1], "powersave": [2]}}
    changes = environment_changes([before.typical()], [after.typical()])
    assert changes is not None
    assert [(one.fact, one.before, one.after) for one in changes] == [
        ("cpu.governor", "", "performance"),
        ("env.NCCL_ALGO", "Ring", ""),
        ("torch.version", "2.9", "2.10"),
    ]
    assert changes[1].text() == "env.NCCL_ALGO is not set, was Ring"
    views = query("SELECT fact, before, after FROM environment_changes WHERE job = 'job' AND run = 2 ORDER BY fact", {})
    assert list(zip(views["fact"], views["before"], views["after"], strict=True)) == [
        ("cpu.governor", "", "performance | powersave"), ("env.NCCL_ALGO", "Ring", ""),
        ("torch.version", "2.9", "2.10"),
    ]  # fmt: skip
    differing = query("SELECT fact, value, some_ranks FROM environment_differences WHERE run = 2 ORDER BY value", {})
    assert differing["value"].tolist() == ["performance", "powersave"]
    assert [list(ranks) for ranks in differing["some_ranks"]] == [[0, 1], [2]]


def test_what_is_not_known_is_no_change(store: Store) -> None:
    query = partial(query_columns, store)
    put(store, 1, [{"torch.version": "2.9", "git.commit": "a"}])
    put(store, 2, [{"unreadable": "versions,git.commit"}])
    nothing = read_environment(query, "job", 3)
    assert nothing == Environment()
    known, unread = (read_environment(query, "job", run).typical() for run in (1, 2))
    assert environment_changes([known], [nothing.typical()]) is None
    assert environment_changes([{}, known], [known, {}]) == []
    assert environment_changes([known], [unread]) == []
    assert environment_changes([known], [{"unreadable": "process"}]) == []
    put(store, 3, [{"torch.version": "2.10", "unreadable": "git.commit"}, {"torch.version": "2.10"}])
    views = query("SELECT run, fact, before, after, ranks FROM environment_changes WHERE job = 'job'", {})
    assert len(views["run"]) == 0, "versions were unreadable in run 2, the commit in run 3"
    assert [one.fact for one in environment_changes([known], [read_environment(query, "job", 3).typical()]) or []] == [
        "torch.version"
    ]


def test_a_change_says_of_how_many_ranks(store: Store) -> None:
    put(store, 1, [{"torch.version": "2.9"}] * 3)
    put(store, 2, [{"torch.version": "2.10"}] * 2 + [{"unreadable": "process"}])
    views = query_columns(store, "SELECT fact, before, after, ranks FROM environment_changes WHERE job = 'job'")
    assert [list(column) for column in views.values()] == [["torch.version"], ["2.9"], ["2.10"], [2]]


def test_what_a_run_of_each_side_has_is_no_change() -> None:
    first, second, third = ({"torch.version": one} for one in ("2.9", "2.10", "2.11"))
    assert environment_changes([first, second], [second, third]) == []
    (change,) = environment_changes([first, second], [third]) or []
    assert (change.before, change.after) == ("2.10 | 2.9", "2.11")
