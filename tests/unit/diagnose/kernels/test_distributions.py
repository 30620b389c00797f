"""Kernels that take longer on some ranks, by their distributions as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from argus.compress.kernels import Compressor
from argus.diagnose.kernels.distributions import by_distribution, candidates, compared, detect, distances
from argus.diagnose.read.gpu_times import COMPUTES, GpuWindow, times_of
from argus.diagnose.read.peers import Mesh
from argus.diagnose.suspect import Suspect
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.cases import case_of
from tests.stores import new_store

MS = 1_000_000
STEPS, STEP_MS = 60, 20
NAMES = {"gemm": 40, "softmax": 10, "adam": 5}
RANKS = 6
COLUMNS = (
    "rank", "step", "kernels", "collective_ns", "pipeline_ns", "transfer_ns", "idle_ns", "step_ns",
    *(f"{name}_ns" for name in COMPUTES)
)  # fmt: skip


def rows(factor: dict[tuple[str, int, int], float], *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Launches of 50, 60 and 70 us; ``factor``: by (kernel, rank) and the step from which on they take longer."""
    rng, compressor = np.random.default_rng(seed), Compressor()
    group = {name: compressor.group(name, 7, 0, (8, 1, 1), (128, 1, 1)) for name in NAMES}
    for step in range(STEPS):
        for rank in range(RANKS):
            took, which = [], []
            for place, (name, count) in enumerate(NAMES.items()):
                longer = np.prod([f for (n, r, s), f in factor.items() if (n, r) == (name, rank) and step >= s])
                took.append((50_000 + 10_000 * place) * longer * np.exp(0.02 * rng.standard_normal(count)))
                which.append(np.full(count, group[name]))
            ns = np.concatenate(took).astype(np.int64)
            begin = step * STEP_MS * MS
            start = begin + np.arange(len(ns)) * 300_000
            compressor.feed(rank, step, begin, begin + STEP_MS * MS, np.concatenate(which), start, ns)
    return compressor.take(final=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    jobs = {
        "healthy": {},
        "one": {("softmax", 2, 40): 1.8},
        "half": {("gemm", rank, 0): 1.6 for rank in (0, 1, 2)},
        "little": {("adam", 3, 0): 1.5},
        "all": {("gemm", rank, 20): 1.5 for rank in range(RANKS)},
    }
    with open_store(new_store(tmp_path_factory.mktemp("kernels"))) as opened:
        with Writer(opened, source="test") as writer:
            for job, factor in jobs.items():
                for table, columns in rows(factor).items():
                    more = {"host": "n"} if "rank" in columns else {}
                    writer.append(table, {**columns, **more, "job": job, "run": 1})
        yield opened


def mesh(stage: list[int] | None = None) -> Mesh:
    zero = np.zeros(RANKS, np.int64)
    return Mesh(np.arange(RANKS), zero if stage is None else np.array(stage), zero, zero, staged=False)


def judged(
    store: Store, job: str, named: frozenset[int] = frozenset(), stage: list[int] | None = None
) -> list[Suspect]:
    params = {"job": job, "run": 1, "first": 0, "last": STEPS - 1}
    case = case_of(
        partial(query_columns, store), params, np.full(STEPS, STEP_MS * 1e6), dict.fromkeys(range(RANKS), "n")
    )
    none = times_of({name: np.empty(0) for name in COLUMNS})
    case.gpus = GpuWindow(none, None, mesh(stage), params)
    if named:
        case.suspects = [Suspect("jitter", sorted(named), [], 0, 1, 1.0, 1.0, 1.0, "phase", [], "")]
    return detect(case)


@pytest.mark.thorough
def test_a_kernel_that_is_slow_on_one_rank(store: Store) -> None:
    """0.5 ms of a step of 20 ms: no phase shows it."""
    (found,) = judged(store, "one")
    assert (found.kind, found.ranks, found.kernels) == ("masked_compute_straggler", [2], ["softmax"])
    assert found.level == "kernel"
    assert found.since == pytest.approx(40, abs=2)
    assert "1.80 times as long on rank 2" in found.evidence[0]["text"]
    assert "0.80 of the mean away from theirs (W1)" in found.evidence[0]["text"]
    assert "0.80 of the mean away from what they were" in found.evidence[1]["text"]
    assert found.lost_ns == 0
    # Where another finding names the rank, there is nothing to add.
    assert judged(store, "one", named=frozenset({2})) == []


def test_half_of_the_ranks(store: Store) -> None:
    """The mean W1 of all pairs is the same for all ranks."""
    (found,) = judged(store, "half")
    assert (found.kind, found.ranks, found.kernels) == ("compute_straggler", [0, 1, 2], ["gemm"])
    assert found.since == 0
    assert found.lost_ns == pytest.approx(40 * 30_000, rel=0.05)


@pytest.mark.parametrize("job", ["healthy", "little", "all"])
def test_what_is_no_rank_s_fault_or_costs_nothing(store: Store, job: str) -> None:
    assert judged(store, job) == []


def test_ranks_with_other_work_are_not_compared(store: Store) -> None:
    assert judged(store, "one", stage=[0, 0, 1, 0, 0, 0]) == []
    assert judged(store, "half", stage=[0, 0, 0, 1, 1, 1]) == []


def test_distributions_are_rebuilt(store: Store) -> None:
    query = partial(query_columns, store)
    number = int(query("SELECT kernel_id FROM kernel_groups WHERE kernel = 'softmax' LIMIT 1", {})["kernel_id"][0])
    window = {"job": "one", "run": 1, "first": 45, "last": 59}
    ranks, each = by_distribution(query, window, number, range(RANKS))
    assert ranks.tolist() == list(range(RANKS))
    assert np.median(each, axis=1) == pytest.approx([60e3, 60e3, 108e3, 60e3, 60e3, 60e3], rel=0.01)
    assert np.all(np.diff(each, axis=1) >= 0)
    assert distances(each) == pytest.approx([0, 0, 0.8, 0, 0, 0], abs=0.02)
    # Of half and half the lesser half is the reference.
    assert distances(each[[2, 2, 0, 1]]) == pytest.approx([0.8, 0.8, 0, 0], abs=0.02)


def test_ranks_that_launch_a_kernel_more_often_do_something_else() -> None:
    columns: dict[str, Any] = {
        "kernel_id": np.full(4, 9, np.uint64), "kernel": np.full(4, "gemm", object), "rank": np.arange(4),
        "launches": np.array([100, 100, 100, 100]), "steps": np.full(4, 10),
        "spent_ns": np.array([5, 5, 5, 9]) * 10.0 * MS,
    }  # fmt: skip
    same = dict.fromkeys(range(4), 0)
    assert [one.ranks for one in candidates(columns, same, 50 * MS)] == [(3,)]
    columns["launches"] = np.array([100, 100, 100, 150])
    columns["spent_ns"] = columns["spent_ns"] * columns["launches"] / 100
    assert candidates(columns, same, 50 * MS) == []


# ---- a stage's kernels against others


def of_ranks(*ranks: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """Columns of ten steps; of each rank the launches in a step of each kernel, and ns of one."""
    rows = [(name, rank, *what) for rank, kernels in enumerate(ranks) for name, what in kernels.items()]
    names = sorted({row[0] for row in rows})
    return {
        "kernel_id": np.array([names.index(row[0]) for row in rows]),
        "rank": np.array([row[1] for row in rows]),
        "launches": np.array([10 * row[2] for row in rows]),
        "spent_ns": np.array([10 * row[2] * row[3] for row in rows]),
        "steps": np.full(len(rows), 10),
    }


LAYER = {"gemm": (40, 900.0), "attention": (10, 2000.0), "norm": (20, 100.0), "gelu": (10, 150.0)}


def scaled(times: float = 1.0, ns: float = 1.0, only: str = "") -> dict[str, tuple[int, float]]:
    return {name: (round(n * times), took * (ns if only in name else 1)) for name, (n, took) in LAYER.items()}


@pytest.mark.parametrize(("own", "excess", "reason"), [
    (scaled(ns=2.1), 2.1, "slower"),
    (scaled(ns=1.15), 1.15, "slower"),
    (scaled(times=1.5), 1.5, "more"),
    # Its layers are as everybody's; the time is in a kernel of its own.
    ({**LAYER, "logits": (1, 30_000.0)}, 1.5, "more"),
    # It computes longer, and no kernel says why.
    (LAYER, 1.5, ""),
    # Half and half; just one kernel, as where it is called with other data; as slow, and launched less often.
    (scaled(times=1.5, ns=1.4), 2.1, ""),
    (scaled(ns=2.2, only="gemm"), 1.76, ""),
    (scaled(times=0.8, ns=2.1), 1.7, ""),
    # Most of what it does is a kernel of its own.
    ({**scaled(ns=2.0), "logits": (10, 20_000.0)}, 2.0, ""),
])  # fmt: skip
def test_longer_kernels_are_distinguished_from_more_of_them(
    own: dict[str, tuple[int, float]], excess: float, reason: str
) -> None:
    others = [{**LAYER, "embedding": (1, 500.0)}, LAYER, LAYER]
    for place in range(4):
        found = compared(of_ranks(*others[:place], own, *others[place:]), [place], excess)
        assert found is not None
        assert found.reason == reason


@pytest.mark.parametrize(("factors", "reason"), [
    ((1.3, 1.31, 1.29, 1.3), "slower"),
    # Three only; shapes of their own; the rest is not as elsewhere.
    ((1.3, 1.3, 1.3, 1.0), ""),
    ((1.2, 1.3, 1.45, 1.3), ""),
    ((1.3, 1.3, 1.3, 1.3, 0.8), ""),
])  # fmt: skip
def test_kernels_of_one_kind_that_take_longer_alike_are_a_slow_unit(factors: tuple[float, ...], reason: str) -> None:
    layer = {**{f"gemm{which}": (10, 500.0) for which in range(4)}, "norm": (20, 100.0), **LAYER}
    own = dict(layer)
    for name, factor in zip(layer, factors, strict=False):
        own[name] = (layer[name][0], layer[name][1] * factor)
    excess = sum(n * ns for n, ns in own.values()) / sum(n * ns for n, ns in layer.values())
    found = compared(of_ranks(own, layer, layer), [0], excess)
    assert found is not None
    assert found.reason == reason


def test_kernels_that_cannot_be_compared() -> None:
    assert compared(of_ranks(LAYER, LAYER), [0, 1], 2.0) is None
    assert compared(of_ranks(LAYER, LAYER), [5], 2.0) is None
    strange = {name + "2": what for name, what in scaled(ns=2).items()}
    assert compared(of_ranks(strange, LAYER, LAYER), [0], 2.0) is None
    assert compared({name: values[:0] for name, values in of_ranks(LAYER).items()}, [0], 2.0) is None
