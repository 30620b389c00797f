"""Numbers as people read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from argus.model import units

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (0.4, "0 ns"), (7, "7 ns"), (950, "950 ns"), (999.4, "999 ns"), (3_420, "3.42 µs"), (85e3, "85.0 µs"),
     (123_456, "123 µs"), (12.54e6, "12.5 ms"), (324.4e6, "324 ms"), (1.024e9, "1,024 ms"), (9.99e9, "9,990 ms"),
     (12.5e9, "12.5 s"), (90e9, "90.0 s"), (1234e9, "1,234 s"), (7200e9, "7,200 s")],
)  # fmt: skip
def test_durations(ns: float, text: str) -> None:
    assert units.duration(ns) == text
    assert units.duration(-ns) == ("0 ns" if text == "0 ns" else f"-{text}")
    assert units.duration(ns, signed=True) == ("0 ns" if text == "0 ns" else f"+{text}")
    assert units.duration(-ns, signed=True) == units.duration(-ns)


@pytest.mark.parametrize(
    ("ns", "text"),
    [(999.6, "1.00 µs"), (1_000, "1.00 µs"), (9_994, "9.99 µs"), (9_996, "10.0 µs"), (99_940, "99.9 µs"),
     (99_960, "100 µs"), (999_400, "999 µs"), (999_500, "1.00 ms"), (999_960, "1.00 ms"), (1e6, "1.00 ms"),
     (999.96e6, "1,000 ms"), (9.994e9, "9,994 ms"), (9.996e9, "10.0 s"), (1e10, "10.0 s"), (99.96e9, "100 s"),
     (999.6e9, "1,000 s")],
)  # fmt: skip
def test_durations_are_rounded_before_their_unit_is_chosen(ns: float, text: str) -> None:
    assert units.duration(ns) == text


def test_time_since_the_start() -> None:
    assert [units.elapsed(s) for s in (59.9, 192, 7500)] == ["59 s", "3 min 12 s", "2 h 05 min"]


def test_times_in_a_narrow_column() -> None:
    assert [units.narrow(s) for s in (-1, 0.4, 59.4, 59.6, 192, 18_420, 187_200)] == [
        "0s", "0s", "59s", "1m00s", "3m12s", "5h07m", "2d04h",
    ]  # fmt: skip


def test_times_in_seconds() -> None:
    assert [units.seconds(s) for s in (0, 0.0125, 1.234, 12.5)] == ["0 ns", "12.5 ms", "1.2 s", "12.5 s"]
    assert [units.span_text(s) for s in (0.0, 0.5, 2.0, 30, 300)] == ["0 s", "500 ms", "2 s", "30 s", "5 min 00 s"]
    assert units.elapsed(3_600_000) == "1,000 h 00 min"


def test_bytes_and_rates() -> None:
    assert [units.size(n) for n in (0, 999, 999.96e6, 12.5e6, 3e15, 4e18)] == [
        "0 B", "999 B", "1.0 GB", "12.5 MB", "3.0 PB", "4,000.0 PB",
    ]  # fmt: skip
    assert [units.binary_size(n) for n in (0, 4434432, 1023 << 10, (1 << 20) - 1, 128 << 20, 2048 << 20, 5 << 40)] == [
        "0 B", "4.23 MiB", "1,023 KiB", "1 MiB", "128 MiB", "2 GiB", "5 TiB",
    ]  # fmt: skip
    assert [units.bandwidth(n) for n in (0, 850, 32e9)] == ["0 B/s", "850 B/s", "32.0 GB/s"]
    assert [units.rate(n) for n in (12, 3_400, 1.2e6)] == ["12/s", "3.4k/s", "1.2M/s"]


def test_lists_of_ranks() -> None:
    assert units.rank_text([4, 5, 6, 0, 9, 10]) == "0,4-6,9,10"
    assert [units.ranks_text(ranks) for ranks in ([], [3], [3, 7], list(range(10)))] == [
        "", "rank 3", "ranks 3, 7", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
    ]  # fmt: skip
    assert units.listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert units.ranks_text([3, 5, 9], 2) == "ranks 3, 5 and 1 more"
    assert [units.rank_pattern(r) for r in (range(8), range(0, 64, 8), (1, 4, 6), (2, 3), (5,), ())] == [
        "0-7", "0,8..56", "1,4,6", "2,3", "5", "",
    ]  # fmt: skip


def by_hand(values: re.Pattern[str]) -> dict[str, list[str]]:
    """What is formatted by such a pattern, by file."""
    found = {
        str(path.relative_to(ROOT)): sorted(values.findall(path.read_text()))
        for top in ("argus", "cli")
        for path in (ROOT / top).rglob("*.py")
    }
    return {name: texts for name, texts in found.items() if texts}


BYTES_BY_HAND = {
    "argus/health/run.py": ["{2 ** (round(8 * math.log2(gib)) / 8):.0f} GiB"],  # a key: nodes of one kind have the same
}
"""Bytes and bandwidths that none of the functions writes, by file, and why."""


def test_bytes_are_written_by_one_function() -> None:
    """``size``, ``binary_size`` and ``bandwidth``: what formats by itself writes 12 KB as 0.0 MB."""
    bytes_by_hand = re.compile(r"\{[^{}\n]+\} ?(?:[KMGTP]i?B|[KMGT]?B/s)\b")
    assert bytes_by_hand.findall("f'{a:.1f} GB/s, {b} MiB, {c}B/s, {d} Bytes'") == ["{a:.1f} GB", "{b} MiB", "{c}B/s"]
    assert by_hand(bytes_by_hand) == BYTES_BY_HAND


TIMES_BY_HAND = {
    "argus/compare/observe/settings.py": ["{SHORTEST_S * 1e3:g}ms"],  # as it is typed
    "argus/cupti/collector.py": ["{PERIOD_MS // 1000} s"],  # a ratio: 2 of every 20 s
    "argus/health/check.py": ["{self.span_s / 60:.0f} min"],  # to the minute: the text of two looks is the same
    "argus/health/checks/kernel_log.py": ["{look.limits['hours']:.0f} h"],  # a setting in hours
    "argus/health/checks/run_queue.py": ["{share:.2f} s"],  # a ratio: 0.30 s a second
    "argus/health/checks/xid.py": [
        "{look.limits['hours']:.0f} h", "{age_s / 3600:.0f} h", "{age_s / 60:.0f} min",  # as those two
    ],
    "argus/health/cron.py": ["{plan.minutes} minutes"],  # as cron has it
    "argus/health/output.py": ["{run.wall_s:.2f}s"],  # performance data of Nagios
    "argus/model/text.py": ["{word}s"],  # a plural
    "argus/model/units.py": ["{whole}s", "{whole} s", "{whole % 60:02d} s", "{whole // 60} min", "{whole // 3600:,} h",
                             "{whole % 3600 // 60:02d} min"],
    "cli/live.py": ["{view.elapsed_s:7.1f} s"],  # a column of a log, in one unit
    "cli/options.py": ["{self._shortest_s:g}s"],  # as it is typed
}  # fmt: skip
"""Times that none of the functions writes, by file, and why."""


def test_times_are_written_by_one_function() -> None:
    """``duration`` and what is made of it: what formats by itself writes 3 ms as 0.0 s, and an hour as 3600 s."""
    times = re.compile(r"\{[^{}\n]+\} ?(?:s|ms|µs|us|ns|min|h|seconds?|minutes?|hours?)\b")
    assert by_hand(times) == {name: sorted(texts) for name, texts in TIMES_BY_HAND.items()}


def test_ranks_on_hosts_without_a_name() -> None:
    assert units.ranks_on([2], ["node-1"]) == "rank 2 on node-1"
    assert units.ranks_on((2, 3), ["node-1", "unknown", "node-1", "node-2", ""]) == "ranks 2, 3 on node-1, node-2"
    assert units.ranks_on([2], ["unknown"]) == units.ranks_on([2], [""]) == "rank 2"
