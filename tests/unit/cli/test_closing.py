"""How a trace ends: the verdict first, then what was recorded, its coverage and its cost."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from argus.cli import closing
from argus.diagnose import stored as stored_module
from argus.model.errors import ArgusError
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.url import parse_url
from argus.store.writer import Writer
from tests.builders.stored_job import WALL, store_job
from tests.builders.synthetic_job import Fault, ddp, simulate
from tests.stores import new_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A healthy job, and one of which rank 2 is slow."""
    with open_store(new_store(tmp_path_factory.mktemp("closing"))) as store:
        for name, faults in (("healthy", ()), ("slow", (Fault("compute", (2,), 1.8),))):
            store_job(store, name, simulate(4, 40, ddp(), faults=faults))
            with Writer(store, source="test") as writer:
                writer.append("jobs", {
                    "job": name, "run": 1, "host": "node-0", "started": [WALL], "ended": [WALL + 10**12],
                    "world_size": 4, "launcher": "torchrun", "mono_offset_ns": 0, "argus_version": "0", "version": 1,
                })  # fmt: skip
        yield store


def a_job(name: str, owner: tuple[int, str] = (1000, ""), **more: Any) -> Any:
    return SimpleNamespace(name=name, run=1, owner=owner, **more)


def a_tracer(job: str = "healthy", *, ranks: int = 4, samples: int = 7, **more: Any) -> Any:
    """Stands in for a tracer that has stopped."""
    identity = SimpleNamespace(world_size=ranks)
    member = {"launches": 10, "collectives": 3, "steps": 40, "state": "traced"} | more
    members = [
        SimpleNamespace(rank=rank, target=SimpleNamespace(pid=100 + rank, identity=identity), **member)
        for rank in range(ranks)
    ]
    jobs = [a_job(job, ranks=lambda: members, members=dict(enumerate(members)))]
    output = lambda *lines: lambda **_: list(lines)  # noqa: E731
    return SimpleNamespace(
        jobs=jobs, past=Counter(), samples=samples, host="node-0", started_ns=0, store_error="", steps_go=output(),
        utilization=output(), mesh=output(), gpu_times=output(), stacks=output("stacks: 7 samples"),
        not_started=output(), overhead=output("overhead: 0.10% of the job's time"),
    )  # fmt: skip


def sum_up(
    tracer: Any, store: Store | None, lost: dict[str, int] | None = None, *, terminal: bool = False
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    assert closing.sum_up(console, tracer, lost or {}, store) == 0
    return out.getvalue().splitlines()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that has just begun: all of the run is diagnosed."""
    monkeypatch.setattr(closing, "WHOLE_S", float("inf"))


def test_the_verdict_comes_first_with_evidence_and_action(store: Store) -> None:
    lines = sum_up(a_tracer("slow"), store)
    assert lines[0].startswith("DEGRADED  slow  4 ranks, steps ")
    order = (
        "1. compute straggler  rank 2",
        "   · ",
        "   → Check the GPU",
        "4 ranks, 40 launches, 12 collectives, 40 steps a rank",
        "stacks: 7",
        "coverage: complete, nothing was lost",
        "overhead: 0.10%",
        "next: argus diagnose -v",
    )
    places = [next(at for at, line in enumerate(lines) if line.startswith(words)) for words in order]
    assert places == sorted(places)
    assert sum(line.startswith("   · ") for line in lines) <= 2
    assert not any("W1" in line for line in lines)
    stored = query_columns(store, "SELECT kind, ranks FROM findings WHERE job = 'slow'")
    assert stored["kind"].tolist() == ["compute_straggler"]


def test_of_many_steps_the_newest_are_diagnosed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that floods makes a million in minutes. What is said of a part is no baseline of the job."""
    whole = sum_up(a_tracer(), store)[0]
    last = int(re.search(r"steps \d+ to (\d+)", whole)[1])  # type: ignore[index]
    learned = []
    monkeypatch.setattr("argus.diagnose.learn.learn", lambda store, verdict: learned.append(verdict["steps"]))
    assert not any("newest" in line for line in sum_up(a_tracer(), store))
    assert len(learned) == 1
    monkeypatch.setattr(closing, "MOST_STEPS", 20)
    lines = sum_up(a_tracer(), store)
    assert lines[0].startswith("HEALTHY  healthy  4 ranks, steps ")
    assert f"steps {last - 19} to {last}" in lines[0]
    assert "  of the newest 20 steps; argus diagnose covers all of it" in lines
    assert len(learned) == 1


def test_a_healthy_job_is_called_healthy(store: Store) -> None:
    for terminal in (False, True):
        lines = sum_up(a_tracer(), store, terminal=terminal)
        assert any(line.startswith("HEALTHY  healthy  4 ranks, steps ") for line in lines)


def test_without_a_verdict(store: Store) -> None:
    lines = sum_up(a_tracer("slow"), None)
    assert lines[0].startswith("4 ranks, 40 launches")
    assert lines[-1] == "next: argus diagnose   or: argus sql"


def test_nothing_recorded_is_nothing_to_diagnose(store: Store) -> None:
    lines = sum_up(a_tracer(ranks=1, samples=0, launches=0, collectives=0, steps=0), store)
    assert lines[0].startswith("nothing to diagnose: ")
    assert "1 rank, 0 steps" in lines
    assert not any(line.startswith(("next", "coverage")) for line in lines)
    # What ran on a CPU is something.
    assert sum_up(a_tracer("slow", ranks=1, launches=0, collectives=0, steps=0), store)[0].startswith("DEGRADED")


def test_on_a_terminal_lines_are_folded_between_words(store: Store) -> None:
    lost = {"range_probes_detached": 1, "launches_dropped": 1}
    lines = sum_up(a_tracer(), store, lost, terminal=True)
    assert all(len(line) <= 80 for line in lines)
    whole = sum_up(a_tracer(), store, lost)
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(whole).split()), "and nothing else is changed"
    at = next(place for place, line in enumerate(lines) if line.startswith("coverage: incomplete"))
    assert lines[at + 1].startswith("  ")
    console = Console(file=(out := io.StringIO()), force_terminal=True, width=60, color_system=None)
    closing.say(console, f"  files of rows are in /var/lib/argus/{'x' * 70}/aside")
    assert out.getvalue().splitlines() == ["  files of rows are in", f"    /var/lib/argus/{'x' * 70}/aside"]


def test_losses_are_reported_in_words(store: Store) -> None:
    lines = sum_up(a_tracer(), None, {"range_probes_detached": 1, "launches_dropped": 1})
    (line,) = [line for line in lines if line.startswith("coverage: ")]
    assert line.startswith("coverage: incomplete (1 CUDA call lost: their ring was full")
    assert "range_probes_detached" not in line


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("exited", "ended meanwhile: processes 100, 101"),
        ("traced", "2 ranks, 2 launches, 2 collectives, 1 step a rank"),
    ],
)
def test_singular_and_plural(state: str, words: str) -> None:
    lines = sum_up(a_tracer(ranks=2, state=state, launches=1, collectives=1, steps=1), None)
    assert words in lines


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ArgusError("the store is away"), "not diagnosed: the store is away"),
        (KeyboardInterrupt(), "not diagnosed: interrupted; all rows are stored"),
        (ValueError("a defect"), "not diagnosed: it failed (ValueError: a defect)"),
    ],
)
def test_what_cannot_be_diagnosed_is_summed_up(
    store: Store, monkeypatch: pytest.MonkeyPatch, failure: BaseException, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("argus.diagnose.stored.diagnose_store", fail)
    lines = sum_up(a_tracer(), store)
    assert lines[0] == words
    assert "coverage: complete, nothing was lost" in lines


def with_jobs(*owned: tuple[str, tuple[int, str]]) -> Any:
    """A tracer of jobs of several owners."""
    tracer = a_tracer()
    (one,) = tracer.jobs
    tracer.jobs = [a_job(name, owner, ranks=one.ranks, members=one.members) for name, owner in owned]
    return tracer


@pytest.mark.parametrize("failure", [ArgusError("memory limit exceeded"), MemoryError("no room")])
def test_a_job_that_cannot_be_diagnosed_costs_no_other_its_verdict(
    store: Store, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    real = stored_module.diagnose_store

    def diagnose(store: Store, job: str, run: int, **options: Any) -> Any:
        if job.startswith("hostile"):
            raise failure
        return real(store, job, run, **options)

    monkeypatch.setattr(stored_module, "diagnose_store", diagnose)
    monkeypatch.setattr("argus.diagnose.follow.watch.in_charge", lambda *_: "node-0")
    before = int(query_columns(store, "SELECT count() AS n FROM findings WHERE job = 'slow'")["n"][0])
    lines = sum_up(with_jobs(("hostile 1", (1001, "")), ("slow", (1000, "")), ("hostile 2", (1001, ""))), store)
    assert any(line.startswith("DEGRADED  slow") for line in lines)
    assert int(query_columns(store, "SELECT count() AS n FROM findings WHERE job = 'slow'")["n"][0]) == before + 1
    (line, _) = [line for line in lines if "not diagnosed" in line]
    assert line.startswith("hostile 1: not diagnosed: ")
    assert line.endswith(": argus diagnose --job 'hostile 1'")


def test_each_owner_has_a_verdict_whoever_has_more_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(closing, "_verdict", lambda store, tracer, job: asked.append(job.name) or [])
    many = [(f"x{number}", (1001, f"pod {number % 5}")) for number in range(40)]
    same = [("honest", (1001, "pod 2"))]
    lines = sum_up(with_jobs(("honest", (1000, "")), ("other", (1002, "pod 9")), *many, *same), a_store())
    assert len(asked) == closing.VERDICTS
    assert asked[:3] == ["honest", "other", "x20"]
    assert set(asked[3:7]) == {"x21", "x27", "x23", "x24"}
    (line,) = [line for line in lines if line.startswith("not diagnosed: ")]
    assert line.startswith("not diagnosed: 27 more jobs: x0, x1, x2, ")
    assert line.endswith(", x7 and 19 more: argus diagnose --job x0")
    asked.clear()
    sum_up(with_jobs(*((f"x{number}", (1000, "")) for number in range(6))), a_store())
    assert asked == ["x2", "x3", "x4", "x5"], "the newest of the only owner"


def test_verdicts_have_bounded_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    asked: list[tuple[str, float, dict[str, int]]] = []

    def verdict(store: Store, tracer: Any, job: Any) -> list[Any]:
        assert store.bounds is not None
        asked.append((job.name, store.bounds.until_s - now[0], dict(store.bounds.settings)))
        now[0] += 200.0
        return []

    monkeypatch.setattr(closing, "_verdict", verdict)
    monkeypatch.setattr(closing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = sum_up(with_jobs(("a", (1, "")), ("b", (2, "")), ("c", (3, ""))), a_store())
    settings = closing.SETTINGS
    assert asked == [("a", closing.WITHIN_S / 3, settings), ("b", (closing.WITHIN_S - 200) / 2, settings)]
    assert "not diagnosed: 1 more job: c: argus diagnose --job c" in lines


def a_store() -> Store:
    """One that nothing is asked of."""
    return Store(parse_url("chdb:///nowhere"), create=False)


def test_a_spool_and_another_hosts_job_are_not_diagnosed(store: Store, tmp_path: object) -> None:
    spool = Store(parse_url(f"spool://{tmp_path}"), create=False)
    assert sum_up(a_tracer(), spool)[0].startswith("not diagnosed: rows are in a spool")
    tracer = a_tracer("slow")
    tracer.host = "node-7"
    assert sum_up(tracer, store)[0] == "slow: the verdict is node-0's, which traces the lowest rank"


def test_no_rank_is_an_error() -> None:
    with pytest.raises(ArgusError, match="no rank was seen"):
        sum_up(SimpleNamespace(jobs=[]), None)
