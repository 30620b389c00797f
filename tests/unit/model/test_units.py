"""Numbers as people read them."""

from __future__ import annotations

from argus.model import units


def test_durations() -> None:
    assert [units.duration(ns) for ns in (0, 999, 3_420, 12.54e6, 999.96e6, 9e10)] == [
        "0 ns", "999 ns", "3.4 µs", "12.5 ms", "1000.0 ms", "90.0 s",
    ]  # fmt: skip
    assert [units.short_duration(ns) for ns in (-12.54e6, 950e6, 5.4321e12)] == ["-12.5 ms", "950 ms", "5,432 s"]
    assert [units.milliseconds(1024.55e6), units.milliseconds(1.234e5, ".3g")] == ["1,024.5 ms", "0.123 ms"]
    assert [units.plain_ms(1024.55e6), units.milliseconds(-9e4)] == ["1024.5 ms", "-0.1 ms"]
    below = (2_345.6, 99_999, 1e5, 999_999, 1e6)
    assert [units.clock_difference(ns) for ns in below] == ["2 us", "100 us", "100 us", "1,000 us", "1.0 ms"]
    assert [units.issue_delay(ns) for ns in below] == ["2 us", "100 us", "0.1 ms", "1.0 ms", "1.0 ms"]
    assert [units.part_of_step(ns) for ns in below] == ["2.3 µs", "100.0 µs", "0.1 ms", "1.0 ms", "1.0 ms"]
    assert [units.elapsed(s) for s in (59.9, 192, 7500)] == ["59 s", "3 min 12 s", "2 h 05 min"]


def test_bytes_and_rates() -> None:
    assert [units.size(n) for n in (999, 12.5e6, 3e15, 4e18)] == ["999 B", "12.5 MB", "3.0 PB", "4000.0 PB"]
    assert [units.binary_size(n) for n in (0, 4434432, 1023 << 10, 5 << 40)] == ["0 B", "4.23 MiB", "1023 KiB", "5 TiB"]
    assert units.mebibytes((2048 << 20) + 5) == "2,048 MiB"
    assert [units.rate(n) for n in (12, 3_400, 1.2e6)] == ["12/s", "3.4k/s", "1.2M/s"]


def test_lists_of_ranks() -> None:
    assert units.rank_text([4, 5, 6, 0, 9, 10]) == "0,4-6,9,10"
    assert [units.ranks_text(ranks) for ranks in ([], [3], [3, 7], list(range(10)))] == [
        "", "rank 3", "ranks 3, 7", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
    ]  # fmt: skip
    assert units.listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert [units.rank_pattern(r) for r in (range(8), range(0, 64, 8), (1, 4, 6), (2, 3), (5,), ())] == [
        "0-7", "0,8..56", "1,4,6", "2,3", "5", "",
    ]  # fmt: skip
