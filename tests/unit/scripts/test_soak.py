"""What scripts/soak concludes from readings of memory: the slope, its interval, the verdict."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.model.errors import ArgusError
from argus.store.open import Store, open_store
from tests.stores import new_store, rows

MINUTES = np.arange(0, 60, 1 / 6)


@pytest.fixture
def soak(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(root / "scripts"))
    return importlib.import_module("soak")


@pytest.fixture
def processes(soak: Any) -> Any:
    return importlib.import_module("benches._processes")


def wandering(seed: int, size: int, follows: float) -> Any:
    """Noise of which a reading follows the one before."""
    noise = np.random.default_rng(seed).normal(size=size)
    for at in range(1, size):
        noise[at] += follows * noise[at - 1]
    return noise


def test_a_line_has_its_slope(processes: Any) -> None:
    found = processes.slope(MINUTES, 100 + 0.25 * MINUTES)
    assert (found.gain, found.error) == (pytest.approx(0.25), pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize("follows", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("size", [24, 60, 360])
def test_the_interval_holds_the_slope_as_often_as_it_says(processes: Any, follows: float, size: int) -> None:
    """Memory wanders: an interval that took readings as independent would be too narrow by a factor of three."""
    held = 0
    for seed in range(300):
        found = processes.slope(MINUTES[:size], 0.1 * MINUTES[:size] + wandering(seed, size, follows))
        held += found.low <= 0.1 <= found.high
    assert held >= 0.9 * 300


def test_few_readings_have_a_wider_interval(processes: Any) -> None:
    """Student's t, from tables."""
    for freedom, point in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)):
        assert processes._student(freedom) == pytest.approx(point, abs=5e-4)


def test_too_few_readings_are_an_error(processes: Any) -> None:
    with pytest.raises(ArgusError, match="too few readings"):
        processes.slope(MINUTES[:19], MINUTES[:19])


@pytest.mark.parametrize(
    ("gain", "noise", "word", "code"), [(0.0, 0.1, "flat", 0), (1.0, 0.1, "grows", 1), (0.2, 3.0, "unclear", 2)]
)
def test_a_verdict_goes_by_the_whole_interval(
    soak: Any, processes: Any, gain: float, noise: float, word: str, code: int
) -> None:
    watched = processes.Watched(list(MINUTES), list(100 + gain * MINUTES + noise * wandering(1, len(MINUTES), 0.5)))
    found = soak.judge("tracer", watched, 20.0, 0.2)
    assert found.word == word
    assert soak.exit_code([soak.Verdict("flat", ""), found]) == code
    if word == "grows":
        assert "+1.0" in found.line
        assert "in a week +9.8" in found.line


def test_the_warm_up_is_left_out(soak: Any, processes: Any) -> None:
    """Tables that fill are no leak."""
    values = np.where(MINUTES < 20, 5 * MINUTES, 100.0) + 0.1 * wandering(2, len(MINUTES), 0.5)
    watched = processes.Watched(list(MINUTES), list(values))
    assert soak.judge("engine", watched, 0.0, 0.2).word == "grows"
    assert soak.judge("engine", watched, 21.0, 0.2).word == "flat"


def test_the_engine_reports_what_its_memory_is_made_of(soak: Any, shared: Store) -> None:
    found = soak.engine_state(shared.url)
    sizes = ", ".join(rf"{name} ([\d.]+)" for name in ("caches", "tracked", "allocated", "resident"))
    match = re.fullmatch(rf" \({sizes} MB, \d+ active parts, \d+ inactive\)", found)
    assert match
    _, tracked, allocated, resident = map(float, match.groups())
    assert tracked > 1
    assert 1 < allocated <= resident
    assert soak.engine_state("clickhouse://127.0.0.1:1/none").startswith(" (")


def test_lists_of_stored_batches_are_shortened_in_every_table_that_has_one(soak: Any, tmp_path: Path) -> None:
    url = new_store(tmp_path)
    sql = f"SELECT extract(create_table_query, '{soak.WINDOW} = (\\\\d+)') AS size FROM system.tables"
    with open_store(url) as store:
        before = [int(size) for (size,) in rows(store, sql) if size]
        soak.shorten_lists(url, 64)
        after = [int(size) for (size,) in rows(store, sql) if size]
    assert len(before) > 20
    assert set(before) == {1000, 20_000}
    assert after == [size // 64 for size in before]


def test_the_tables_that_it_makes_smaller_are_there(soak: Any) -> None:
    """One had moved, and the soak ended at once."""
    for name in importlib.import_module("benches.memory").TABLES:
        module, _, size = name.rpartition(".")
        assert getattr(importlib.import_module(module), size) >= 64, name
