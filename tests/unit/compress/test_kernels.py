"""What the compression of kernel durations must not lose, and that it adds up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from argus.compress.bins import BINS, CENTER_NS, LONGEST_NS, PER_NEPER, bins_of, occupied
from argus.compress.codes import RANGE_UNIT
from argus.compress.decode import decode_escapes, decode_summaries
from argus.compress.fidelity import power, quantile_error, recall, w1
from argus.compress.kernels import GRIDS, SINGLE, SPIKES, Compressor, kernel_id, normalised
from argus.compress.templates import SHAPE_UNIT

STEP_NS = 1_000_000_000
Rows = dict[str, dict[str, Any]]


def mixture(rng: np.random.Generator, n: int, share: float = 0.7, spread: float = 0.02) -> NDArray[np.int64]:
    """Two modes, at 20 and 60 us."""
    center = np.where(rng.random(n) < share, np.log(20e3), np.log(60e3))
    return np.exp(center + spread * rng.standard_normal(n)).astype(np.int64)


def feed(compressor: Compressor, rank: int, step: int, group: int, took: NDArray[Any]) -> NDArray[np.int64]:
    start = step * STEP_NS + np.arange(len(took)) * (STEP_NS // max(len(took), 1))
    compressor.feed(rank, step, step * STEP_NS, (step + 1) * STEP_NS, np.full(len(took), group), start, took)
    return start


def kernel(compressor: Compressor, name: str = "void gemm<float>(int)") -> int:
    return compressor.group(name, 7, 0, (1, 2, 3), (128, 1, 1))


def trained(seed: int = 0, n: int = 2000, **options: Any) -> tuple[Compressor, int, np.random.Generator]:
    """A compressor with a template, and its rows of until then taken."""
    compressor, rng = Compressor(**options), np.random.default_rng(seed)
    group = kernel(compressor)
    for step in range(32):
        feed(compressor, 0, step, group, mixture(rng, n))
    assert len(compressor.take()["kernel_templates"]["template"]) == 1
    return compressor, group, rng


def templates_of(seed: int = 0) -> dict[str, Any]:
    """The template that ``trained`` makes."""
    compressor, rng = Compressor(), np.random.default_rng(seed)
    group = kernel(compressor)
    for step in range(32):
        feed(compressor, 0, step, group, mixture(rng, 2000))
    return compressor.take()["kernel_templates"]


def column(rows: Rows, table: str, name: str) -> list[Any]:
    found = rows.get(table, {}).get(name, [])
    return found.to_pylist() if isinstance(found, pa.Array) else list(np.asarray(found).tolist())


def counted(every: Iterable[Rows]) -> tuple[int, int]:
    """Launches and their time, of rows of all tables."""
    count = total = 0
    for rows in every:
        for table in ("kernel_summaries", "kernel_escapes"):
            count += sum(column(rows, table, "count"))
            total += sum(column(rows, table, "total_ns"))
        total += sum(column(rows, "kernel_spikes", "duration_ns"))
    return count, total


# ---- what must survive ----


def test_what_is_held_may_be_handed_out_at_any_time() -> None:
    for seed in range(10):
        rng, early, late = np.random.default_rng(seed), Compressor(steps_per_row=4), Compressor(steps_per_row=4)
        parts: dict[int, list[Rows]] = {id(early): [], id(late): []}
        for compressor in (early, late):
            kernel(compressor)
            kernel(compressor, "other")
        for step in range(60):
            for group in range(2):
                took = mixture(rng, int(rng.integers(1, 80)))
                for compressor in (early, late):
                    feed(compressor, 0, step, group, took)
            if rng.random() < 0.2:
                early.mature()
                assert early.held == 0
            for compressor in (early, late):
                parts[id(compressor)].append(compressor.take())
        for compressor in (early, late):
            parts[id(compressor)].append(compressor.take(final=True))
            assert compressor.held == 0
        sums = [counted(rows)[1] for rows in parts.values()]
        spikes = [sum(len(column(r, "kernel_spikes", "duration_ns")) for r in rows) for rows in parts.values()]
        counts = [counted(rows)[0] + more for rows, more in zip(parts.values(), spikes, strict=True)]
        assert sums[0] == sums[1]
        assert counts[0] == counts[1]


def test_one_spike_among_ten_thousand_launches_is_stored_with_its_time() -> None:
    compressor, group, rng = trained()
    took = mixture(rng, 10_000)
    took[4321] = 40 * 60_000
    start = feed(compressor, 0, 32, group, took)
    rows = compressor.take()
    assert column(rows, "kernel_spikes", "duration_ns") == [40 * 60_000]
    assert column(rows, "kernel_spikes", "ts") == [start[4321]]
    assert column(rows, "kernel_summaries", "spikes") == [1]
    assert column(rows, "kernel_summaries", "count") == [10_000]
    longest = np.exp(column(rows, "kernel_summaries", "spike_sum")[0] / 64)
    assert longest == pytest.approx(40 * 60_000, rel=0.008)
    (high,) = column(rows, "kernel_summaries", "high")
    assert high < 1.5 * RANGE_UNIT, "it is in no cell"


def test_a_spike_before_there_is_a_template_is_stored_with_its_time() -> None:
    compressor, rng = Compressor(), np.random.default_rng(3)
    group = kernel(compressor)
    starts = []
    for step in range(32):
        took = mixture(rng, 10_000)
        took[777] = 40 * 60_000 if step == 5 else took[777]
        starts.append(feed(compressor, 0, step, group, took)[777])
    rows = compressor.take()
    assert column(rows, "kernel_spikes", "ts") == [starts[5]]
    assert column(rows, "kernel_spikes", "step") == [5]
    assert counted([rows])[0] == 32 * 10_000


def test_a_change_of_shape_within_a_cell_is_stored_as_a_histogram() -> None:
    """The same counts and means by cell, and a distribution that codes cannot represent: two values for a broad
    mode."""
    compressor, rng = Compressor(cells=1), np.random.default_rng(1)
    group = kernel(compressor)
    for step in range(32):
        feed(compressor, 0, step, group, np.exp(np.log(2e4) + 0.1 * rng.standard_normal(4000)).astype(np.int64))
    compressor.take()
    usual = np.exp(np.log(2e4) + 0.1 * rng.standard_normal(4000)).astype(np.int64)
    feed(compressor, 0, 32, group, usual)
    assert "kernel_escapes" not in compressor.take()
    both = np.where(np.arange(4000) % 2, 18_000, 22_000)
    feed(compressor, 0, 33, group, both)
    rows = compressor.take()
    assert column(rows, "kernel_escapes", "reason") == ["shape"]
    value, weight = decode_escapes(rows["kernel_escapes"]).points()
    assert w1(both.astype(float), value[0], weight[0]) < 0.01


def test_a_trend_within_a_step_is_reported() -> None:
    compressor, group, rng = trained()
    feed(compressor, 0, 32, group, mixture(rng, 2000))
    slower = mixture(rng, 2000, spread=0.005)
    slower[1000:] = (slower[1000:] * 1.1).astype(np.int64)
    feed(compressor, 0, 33, group, np.sort(rng.permutation(slower[:1000])))
    feed(compressor, 0, 34, group, np.where(np.arange(2000) < 1000, 20_000, 22_100))
    rows = compressor.take()
    trend = {
        step: code
        for table in ("kernel_summaries", "kernel_escapes")
        for step, code in zip(column(rows, table, "step"), column(rows, table, "trend"), strict=True)
    }
    assert trend[32] == 0
    assert trend[34] == pytest.approx(10, abs=1)


def test_codes_that_would_be_too_large_become_a_histogram() -> None:
    compressor, group, rng = trained()
    limits = np.iinfo(np.int8)
    took = mixture(rng, 2000, share=0.999)
    took[:1000] = 900
    feed(compressor, 0, 32, group, took)
    rows = compressor.take()
    assert set(column(rows, "kernel_escapes", "reason")) <= {"range", "shape"}
    assert column(rows, "kernel_escapes", "count") == [2000]
    value, weight = decode_escapes(rows["kernel_escapes"]).points()
    assert w1(took.astype(float), value[0], weight[0]) < 0.01
    assert limits.max == 127


def test_a_kernel_never_seen_before_is_stored_at_the_end_and_after_a_while() -> None:
    compressor, _, rng = trained()
    other = kernel(compressor, "softmax")
    took = mixture(rng, 50)
    feed(compressor, 0, 32, other, took)
    assert "kernel_escapes" not in compressor.take()
    for step in range(33, 33 + 64):
        feed(compressor, 0, step, kernel(compressor), mixture(rng, 2000))
    # Its own next step comes late: what was held is stored by then.
    rows = compressor.take()
    found = zip(column(rows, "kernel_escapes", "reason"), column(rows, "kernel_escapes", "count"), strict=True)
    assert [count for reason, count in found if reason == "new"] == [50]
    assert compressor.counters["rows_new"] == 1
    third = kernel(compressor, "third")
    feed(compressor, 1, 97, third, took)
    assert column(compressor.take(final=True), "kernel_escapes", "count") == [50]


def test_a_kernel_that_runs_once_a_step_gets_a_template_once_there_is_enough() -> None:
    compressor, rng = Compressor(), np.random.default_rng(3)
    group, taken = kernel(compressor), []
    for step in range(40):
        for rank in (0, 1):
            feed(compressor, rank, step, group, mixture(rng, 1, share=1.0))
        taken.append(compressor.take())
    first = next(step for step, rows in enumerate(taken) if "kernel_templates" in rows)
    assert first == 31, "64 launches, although after 16 steps there are 32 rank-steps"
    after = [rows for rows in taken if "kernel_summaries" in rows]
    assert sum(len(column(rows, "kernel_summaries", "count")) for rows in after) > 70
    assert counted(taken)[0] == 80


def test_a_kernel_that_has_changed_gets_a_new_template() -> None:
    compressor, group, rng = trained()
    escaped = 0
    for step in range(32, 32 + 80):
        feed(compressor, 0, step, group, np.exp(np.log(3e4) + 0.3 * rng.standard_normal(2000)).astype(np.int64))
        rows = compressor.take()
        escaped += len(column(rows, "kernel_escapes", "count"))
        if rows.get("kernel_templates"):
            break
    assert column(rows, "kernel_templates", "version") == [2]
    assert 32 <= escaped <= 40, "rows of a changed kernel wait for nobody"
    assert compressor.counters["templates_rebuilt"] == 1
    feed(compressor, 0, step + 1, group, np.exp(np.log(3e4) + 0.3 * rng.standard_normal(2000)).astype(np.int64))
    rows = compressor.take()
    assert "kernel_escapes" not in rows
    assert len(column(rows, "kernel_summaries", "count")) == 1


def test_a_kernel_that_is_slower_throughout_is_no_spike() -> None:
    compressor, group, rng = trained()
    feed(compressor, 0, 32, group, 10 * mixture(rng, 2000))
    rows = compressor.take()
    assert "kernel_spikes" not in rows
    count, total = counted([rows])
    assert (count, total > 10 * 2000 * 20_000) == (2000, True)


def test_spikes_over_the_cap_stay_in_rows_and_are_counted() -> None:
    compressor, group, rng = trained()
    many = 20 * (SPIKES + 100)
    took = mixture(rng, many)
    took[: SPIKES + 50] = 40 * 60_000 + np.arange(SPIKES + 50)
    feed(compressor, 0, 32, group, took)
    rows = compressor.take()
    assert len(column(rows, "kernel_spikes", "ts")) == SPIKES
    assert min(column(rows, "kernel_spikes", "duration_ns")) == 40 * 60_000 + 50
    assert compressor.counters["spikes_over_cap"] == 50
    assert counted([rows]) == (many, int(took.sum()))


# ---- nothing is lost ----


def test_what_is_no_duration_is_rejected_and_counted() -> None:
    compressor = Compressor()
    group = kernel(compressor)
    feed(compressor, 0, 0, group, np.array([-1, 5, LONGEST_NS + 1, LONGEST_NS, 0]))
    feed(compressor, 0, 1, group, np.array([np.nan, 5.0, np.inf, -np.inf]))
    rows = compressor.take(final=True)
    assert compressor.counters["durations_rejected"] == 5
    assert counted([rows]) == (4, LONGEST_NS + 10)


durations = st.one_of(st.integers(0, 2000), st.integers(0, LONGEST_NS), st.sampled_from([0, 1, 1000, 10**12]))


BEYOND_THE_LARGEST_CODE = [
    [*[0] * 12, 3, 2, 0, 2, 828, 1525, 9407, 102_272, 15_695_085_056], [0, 0, 0, 8, 491, 58_480, 69_440],
    [0, 0, 0, 0, 0, 8, 7, 7, 6, 430, 461, 655, 0, 822, 1071],
    [0, 0, 3, 6, 5, 5, 4, 4, 0, 772, 0, 778, 1955, 1940, 2081, 61_776, 71_104, 1000, *[10**12] * 3], [5882],
]  # fmt: skip
"""A template with a cell whose longest point is more than 8 times its mean."""


@example(BEYOND_THE_LARGEST_CODE, 1, 1)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(durations, min_size=0, max_size=30), min_size=1, max_size=12),
    st.sampled_from([1, 4]),
    st.integers(1, 6),
)
def test_any_durations_come_back(steps: list[list[int]], steps_per_row: int, pool: int) -> None:
    """Counts and times exactly; the distribution within 1.6 %, or as true as rows of its template have to be.

    Durations of 0 come back as 1 ns, and the others shorter by as much in all: 2 ns in the mean.
    """
    compressor = Compressor(steps_per_row=steps_per_row, pool=pool)
    group = kernel(compressor)
    every = []
    for step, took in enumerate(steps):
        feed(compressor, 0, step, group, np.array(took, np.int64))
        every.append(compressor.take())
    every.append(compressor.take(final=True))
    assert counted(every) == (sum(map(len, steps)), sum(map(sum, steps)))
    templates = [rows["kernel_templates"] for rows in every if "kernel_templates" in rows]
    spikes: dict[int, list[int]] = {}
    for rows in every:
        for step, took in zip(
            column(rows, "kernel_spikes", "step"), column(rows, "kernel_spikes", "duration_ns"), strict=True
        ):
            spikes.setdefault(step, []).append(took)
    seen: list[int] = []
    for rows in every:
        for table in ("kernel_summaries", "kernel_escapes"):
            part = rows.get(table)
            if part is None:
                continue
            limit = 0.016
            if table == "kernel_summaries":
                known = {name: _join([each[name] for each in templates]) for name in templates[0]}
                decoded = decode_summaries(part, known)
                limit = 0.01 + 1.5 * float(max(known["escape_error"]))
            else:
                decoded = decode_escapes(part)
            value, weight = decoded.points()
            for k, (step, many) in enumerate(zip(part["step"].tolist(), part["steps"].tolist(), strict=True)):
                seen += range(step, step + many)
                sample = sorted(x for s in range(step, step + many) for x in steps[s])
                for spike in (x for s in range(step, step + many) for x in spikes.get(s, [])):
                    sample.remove(spike)
                if sample:
                    assert weight[k].sum() == pytest.approx(len(sample))
                    # A shape's points are rounded to SHAPE_UNIT of its cell's mean; bins are not.
                    exact = 0.5 * SHAPE_UNIT if table == "kernel_summaries" else 1e-9
                    assert (weight[k] * value[k]).sum() == pytest.approx(sum(sample), rel=exact)
                    mean = sum(sample) / len(sample)
                    slack = (2.1 if 0 in sample else 1.0) + (
                        1.5 * SINGLE * mean / len(sample) if table == "kernel_summaries" else 0
                    )
                    assert not mean or w1(np.array(sample, float), value[k], weight[k]) * mean <= limit * mean + slack
    assert {s for s, took in enumerate(steps) if took} <= set(seen)
    assert len(seen) == len(set(seen))


def _join(parts: list[Any]) -> Any:
    return pa.concat_arrays(parts) if isinstance(parts[0], pa.Array) else np.concatenate(parts)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([20, 300, 3000]), st.floats(0.001, 0.5), st.floats(0.05, 0.95))
def test_rows_are_as_true_as_promised(seed: int, n: int, spread: float, share: float) -> None:
    rng = np.random.default_rng(seed)
    compressor = Compressor(pool=8)
    group = kernel(compressor)
    samples = [mixture(rng, n, share, spread) for _ in range(16)]
    for step, took in enumerate(samples):
        feed(compressor, 0, step, group, took)
    rows = compressor.take(final=True)
    spikes = set(zip(column(rows, "kernel_spikes", "step"), column(rows, "kernel_spikes", "duration_ns"), strict=True))
    part = rows["kernel_summaries"]
    value, weight = decode_summaries(part, rows["kernel_templates"]).points()
    limit = 1.5 * float(rows["kernel_templates"]["escape_error"][0]) + 0.01
    for k, step in enumerate(part["step"].tolist()):
        sample = np.array([x for x in samples[step].tolist() if (step, x) not in spikes], float)
        assert w1(sample, value[k], weight[k]) <= max(limit, 1.5 * SINGLE / len(sample) + 0.01)


# ---- several steps in a row ----


def test_calm_steps_share_a_row_and_a_change_has_its_own() -> None:
    compressor, group, rng = trained(steps_per_row=10)
    for step in range(32, 72):
        feed(compressor, 0, step, group, (mixture(rng, 2000) * (1.05 if step == 55 else 1)).astype(np.int64))
    rows = compressor.take(final=True)["kernel_summaries"]
    covered = {
        (step, step + many - 1) for step, many in zip(rows["step"].tolist(), rows["steps"].tolist(), strict=True)
    }
    assert (55, 55) in covered
    assert len(covered) <= 8
    assert int(rows["count"].sum()) == 42 * 2000, "30 and 31 are in the row of 32 to 39"
    assert max(rows["steps"].tolist()) == 10


def test_steps_that_waited_for_a_template_share_rows_as_well() -> None:
    compressor, rng = Compressor(steps_per_row=8), np.random.default_rng(3)
    group, total = kernel(compressor), 0
    for step in range(16):
        for rank in (0, 1):
            took = (mixture(rng, 2000) * (1.05 if (rank, step) == (1, 5) else 1)).astype(np.int64)
            feed(compressor, rank, step, group, took)
            total += int(took.sum())
    rows = compressor.take()
    assert counted([rows]) == (2 * 16 * 2000, total)
    parts: list[tuple[int, int, int]] = []
    for table in ("kernel_summaries", "kernel_escapes"):
        fields = [column(rows, table, name) for name in ("rank", "step", "steps")]
        parts += [(rank, step, step + many - 1) for rank, step, many in zip(*fields, strict=True)]
    assert len(parts) <= 14
    assert (1, 5, 5) in parts
    assert all(first // 8 == last // 8 for _, first, last in parts)
    every = sorted((rank, step) for rank, first, last in parts for step in range(first, last + 1))
    assert every == [(rank, step) for rank in (0, 1) for step in range(16)]


def test_of_few_launches_one_that_takes_twice_as_long_makes_no_histogram() -> None:
    compressor, rng = Compressor(steps_per_row=1, pool=8), np.random.default_rng(4)
    group = kernel(compressor)
    took = (20_000 + 50 * rng.standard_normal((16, 40))).astype(np.int64)
    took[12, 7], took[13, 7:10] = 40_000, 50_000
    for step in range(16):
        feed(compressor, 0, step, group, took[step])
    rows = compressor.take(final=True)
    assert column(rows, "kernel_escapes", "step") == [13]
    assert len(rows["kernel_summaries"]["step"]) == 15


def test_of_few_launches_chance_does_not_join_what_differs() -> None:
    """Steps whose halves change places differ by little more than chance has it, of 40 launches."""
    compressor, rng = Compressor(steps_per_row=16), np.random.default_rng(5)
    group = kernel(compressor)
    for step in range(64):
        share = (0.25, 0.75)[step % 2] if step >= 48 else 0.5
        took = np.exp(np.where(np.arange(40) < 40 * share, np.log(20e3), np.log(60e3)) + 0.01 * rng.standard_normal(40))
        feed(compressor, 0, step, group, took.astype(np.int64))
    rows = compressor.take(final=True)
    assert [one for one in sorted(covered(rows)) if one[0] >= 48] == [(step, step) for step in range(48, 64)]


def covered(rows: dict[str, Any]) -> list[tuple[int, int]]:
    steps = [column(rows, "kernel_summaries", name) for name in ("step", "steps")]
    return [(step, step + many - 1) for step, many in zip(*steps, strict=True)]


def test_rows_end_at_the_same_steps_on_all_ranks() -> None:
    compressor, group, rng = trained(steps_per_row=8)
    for step in range(33, 52):
        for rank in (0, 1):
            if step >= (33, 37)[rank]:
                feed(compressor, rank, step, group, mixture(rng, 2000).astype(np.int64))
    assert sorted(covered(compressor.take())) == [(33, 39), (37, 39), (40, 47), (40, 47)], "48 to 51 is open"
    assert compressor.holds(0)
    compressor.release(0)
    assert not compressor.holds(0)
    assert covered(compressor.take()) == [(48, 51)]
    compressor.cover(1)
    assert covered(compressor.take()) == [(48, 51)], "of rank 1: what was open ends where rows become shorter"
    feed(compressor, 0, 52, group, mixture(rng, 2000).astype(np.int64))
    assert covered(compressor.take()) == [(52, 52)]
    assert not compressor.holds(0)


def test_a_row_covers_no_step_that_is_not_in_it() -> None:
    compressor, group, rng = trained(steps_per_row=16)
    for step in (32, 33, 35, 36, 37, 38):
        took = mixture(rng, 2000) * (rng.exponential(1.0, 2000) + 0.1 if step == 36 else 1)
        feed(compressor, 0, step, group, took.astype(np.int64))
    rows = compressor.take(final=True)
    assert sorted(covered(rows)) == [(32, 33), (35, 35), (37, 38)]
    assert column(rows, "kernel_escapes", "step") == [36]


# ---- names ----


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::k<float, 4>(int, float*)", "at::native::k<float, 4>"),
        ("(anonymous namespace)::fused<(bool)1>(int)", "fused<(bool)1>"),
        ("triton_poi_fused_add_0d1d2", "triton_poi_fused_add_0d1d2"),
        ("kernel_0123456789abcdef0123456789abcdef", "kernel"),
        ("sm90_xmma_gemm_f16f16", "sm90_xmma_gemm_f16f16"),
    ],
)
def test_names_keep_what_distinguishes_kernels(name: str, short: str) -> None:
    assert normalised(name) == short


def test_kernels_have_the_same_number_everywhere() -> None:
    first, second = Compressor(), Compressor()
    kernel(second, "another")
    assert column(first.take() if kernel(first) else first.take(final=True), "kernel_groups", "kernel_id") == [
        kernel_id("gemm<float>", 7, (1, 2, 3), (128, 1, 1))
    ]
    kernel(second)
    assert kernel_id("gemm<float>", 7, (1, 2, 3), (128, 1, 1)) in column(second.take(), "kernel_groups", "kernel_id")
    many = first.groups(
        ["gemm", "softmax"], np.array([0, 1, 0]), np.array([7, 7, 7]), np.ones((3, 3), int), np.ones((3, 3), int)
    )
    assert many[0] == many[2] != many[1]
    assert first.group("softmax", 7, 5, (1, 1, 1), (1, 1, 1)) == many[1]


def test_grids_that_go_with_the_data_do_not_pile_up() -> None:
    compressor = Compressor()
    numbers = {compressor.group("k", 7, 0, (n, 1, 1), (128, 1, 1)) for n in range(GRIDS + 100)}
    assert len(numbers) == GRIDS + 1
    assert compressor.counters["groups_merged"] == 100
    assert column(compressor.take(), "kernel_groups", "grid")[-1] == []


# ---- bins and measures ----


@given(st.lists(st.integers(1, LONGEST_NS), min_size=1, max_size=50))
def test_bins_are_logarithmic(took: list[int]) -> None:
    found = bins_of(np.array(took)).astype(float)
    assert np.abs(found + 0.5 - np.log(took) * PER_NEPER).max() <= 0.5 + PER_NEPER * 0.0005
    assert CENTER_NS[BINS - 1] > LONGEST_NS


@given(st.lists(st.integers(0, 3 << 20), min_size=1, max_size=50))
def test_keys_are_counted_in_both_ways(keys: list[int]) -> None:
    for space in (4 << 20, 3 << 20 | 1):
        key, count = occupied(np.array(keys), space)
        assert dict(zip(key.tolist(), count.tolist(), strict=True)) == {k: keys.count(k) for k in keys}


def test_measures() -> None:
    sample = np.array([1.0, 2.0, 3.0])
    assert w1(sample, sample, np.ones(3)) == 0
    assert w1(sample, sample + 0.5, np.ones(3)) == pytest.approx(0.25)
    assert w1(sample, np.array([2.0]), np.array([9.0])) == pytest.approx(2 / 3 / 2)
    assert quantile_error(sample, np.array([2.2]), np.array([0.5])) == pytest.approx([0.1])
    assert recall(np.array([1, 2]), np.array([2, 3])) == 0.5
    assert power(np.arange(1000.0), np.array([998.5, 999.5])) == 0.5
