"""Changes of step times while they happen: found where they are, at the rate of false alarms that was set."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.iteration.changes import LASTS, Detector, Event, threshold

Float = NDArray[np.float64]
MANY, STEPS = 100, 500
CHANGES = ("step", "ramp", "jitter")


def watched(times: Float, work: Float | None = None, alarms: float = MANY) -> list[Event]:
    """Events of series (series, steps); ``alarms``: in a million steps, of all of them."""
    detector = Detector(len(times), alarms=alarms, work=0 if work is None else work.shape[2])
    events = []
    for step in range(times.shape[1]):
        events += detector.feed(step, times[:, step], None if work is None else work[:, step])
    return events


def first_of_each(events: list[Event], kinds: tuple[str, ...] = CHANGES) -> dict[int, Event]:
    found: dict[int, Event] = {}
    for event in events:
        if event.kind in kinds:
            found.setdefault(event.series, event)
    return found


def dependent(rng: np.random.Generator, carries: float, spread: float) -> Float:
    noise = rng.standard_normal((MANY, STEPS)) * spread * np.sqrt(1 - carries**2)
    for step in range(1, STEPS):
        noise[:, step] += carries * noise[:, step - 1]
    return np.exp(noise)


def healthy(kind: str) -> Float:
    rng = np.random.default_rng(11)
    shape = MANY, STEPS
    quiet = np.exp(0.02 * rng.standard_normal(shape))
    if kind == "normal":
        return quiet
    if kind == "noisy":
        return np.exp(0.15 * rng.standard_normal(shape))
    if kind == "heavy tails":
        return 1 + 0.05 * rng.pareto(2.5, shape)
    if kind == "autocorrelated":
        return dependent(rng, 0.8, 0.05)
    if kind == "warm-up":
        return np.asarray(quiet * (1 + 2 * np.exp(-np.arange(STEPS) / 15)))
    if kind == "checkpoints":
        quiet[:, 40::50] += 3
        return quiet
    # Checkpoints now and then shortly before.
    quiet[:, 56::150] += 3
    quiet[:, [step for step in range(STEPS) if step % 100 in range(60, 75)]] *= 2
    return quiet


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize(
    "kind", ["normal", "noisy", "heavy tails", "autocorrelated", "warm-up", "checkpoints", "evaluation"]
)
def test_healthy_series_raise_no_more_alarms_than_was_set(kind: str) -> None:
    """Set is one in 1,000 steps of any series, which is 50 in all; then one in a million."""
    assert len(first_of_each(watched(healthy(kind), alarms=1000 * MANY))) <= 50
    assert first_of_each(watched(healthy(kind))) == {}


def test_the_limit_is_what_makes_normal_values_alarm_as_rarely_as_was_set() -> None:
    """An average run of 500 steps: Siegmund's approximation is good to some percent."""
    limit = threshold(500.0)
    rng = np.random.default_rng(3)
    runs, sums, steps = [], np.zeros(4000), 0
    while len(sums):
        steps += 1
        sums = np.maximum(0.0, sums + rng.standard_normal(len(sums)) - 0.5)
        runs += [steps] * int((sums > limit).sum())
        sums = sums[sums <= limit]
    assert np.mean(runs) == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize("growth", [1.1, 1.3, 3.0])
def test_a_step_change_is_found_where_it_is(growth: float) -> None:
    times = healthy("normal")[:, :300]
    times[:, 150:] *= growth
    found = first_of_each(watched(times))
    assert len(found) == MANY
    assert np.median([event.step for event in found.values()]) == 150
    assert np.quantile([abs(event.step - 150) for event in found.values()], 0.95) <= 3
    assert np.quantile([event.decided for event in found.values()], 0.95) <= 150 + LASTS + 20
    assert np.mean([event.kind == "step" for event in found.values()]) > 0.95
    assert np.median([event.after / event.before for event in found.values()]) == pytest.approx(growth, rel=0.02)


@pytest.mark.thorough
def test_slow_growth_adds_up() -> None:
    """0.05 % a step: no two neighbouring windows differ by as much as they scatter."""
    times = healthy("normal") * np.exp(np.maximum(np.arange(STEPS) - 150, 0) * 5e-4)
    events = watched(times)
    found = first_of_each(events)
    assert len(found) > 0.98 * MANY
    assert np.mean([event.kind == "ramp" for event in found.values()]) > 0.8
    assert np.median([event.step for event in found.values()]) == pytest.approx(150, abs=25)
    last = {event.series: event for event in events if event.kind in CHANGES}
    # It goes on growing, and is reported again, against what it was at first.
    assert np.median([event.after / event.before for event in last.values()]) > 1.1


def test_what_came_back_is_reported() -> None:
    times = healthy("normal")
    times[:, 150:300] *= 1.5
    over = first_of_each(watched(times), ("over",))
    assert len(over) == MANY
    assert np.quantile([abs(event.step - 300) for event in over.values()], 0.95) <= 3


def test_long_steps_that_become_more_frequent() -> None:
    times = healthy("checkpoints")
    rng = np.random.default_rng(5)
    times[:, 250:][rng.random((MANY, 250)) < 0.2] += 2
    found = first_of_each(watched(times), ("jitter",))
    assert len(found) > 0.95 * MANY
    assert all(event.step >= 250 for event in found.values())
    spikes = [event for event in watched(times[:1, :100]) if event.kind == "spike"]
    assert [event.step for event in spikes] == [40, 90]
    assert spikes[0].after == pytest.approx(4, abs=0.1)
    assert spikes[0].before == pytest.approx(1, abs=0.1)


def lengths(rng: np.random.Generator) -> tuple[Float, Float]:
    """Times that sequences' lengths explain, and the lengths, beside a measure that explains nothing."""
    length = np.exp(0.3 * rng.standard_normal((MANY, STEPS)))
    times = (0.3 + 0.7 * length**1.2) * np.exp(0.01 * rng.standard_normal((MANY, STEPS)))
    return times, np.stack([np.exp(0.3 * rng.standard_normal((MANY, STEPS))), length], axis=2)


@pytest.mark.thorough
def test_work_that_varies_is_taken_out() -> None:
    rng = np.random.default_rng(7)
    times, work = lengths(rng)
    assert first_of_each(watched(times, work)) == {}
    times[:, 250:] *= 1.12
    known = first_of_each(watched(times, work))
    unknown = first_of_each(watched(times))
    assert len(known) == MANY
    assert np.quantile([abs(event.step - 250) for event in known.values()], 0.9) <= 3
    assert len(unknown) < 0.7 * MANY, "lengths hide it where they are not known"
    # Sequences become longer for good, batches longer and longer: there is more to do.
    longer = np.where(np.arange(STEPS) < 250, 1.0, 1.6)
    grown = work * longer[None, :, None]
    assert first_of_each(watched((0.3 + 0.7 * grown[:, :, 1] ** 1.2), grown)) == {}


def test_work_that_grows_once_and_had_never_varied() -> None:
    times = healthy("normal")[:, :300]
    work = np.ones((MANY, 300, 1))
    work[:, 150:] = 2
    times[:, 150:] *= 2.4
    assert first_of_each(watched(times, work)) == {}
    # Five times as long for twice the work is more than the square of it.
    times[:, 150:] *= 2.1
    assert len(first_of_each(watched(times, work))) == MANY


@pytest.mark.filterwarnings("error")
def test_work_that_is_never_measured_is_no_work() -> None:
    """A job on CPUs has neither launches nor collectives: a measure that no step has explains nothing."""
    times = healthy("normal")[:3, :300]
    times[:, 150:] *= 1.5
    work = np.full((3, 300, 2), np.nan)
    assert [event.kind for event in first_of_each(watched(times, work)).values()] == ["step"] * 3
    work[:, :, 1] = 7.0
    found = first_of_each(watched(times, work))
    assert [event.after / event.before for event in found.values()] == pytest.approx([1.5] * 3, rel=0.05)


def test_gaps_and_what_cannot_be() -> None:
    times = healthy("normal")[:, :300]
    times[:, 150:] *= 1.3
    times[np.random.default_rng(2).random(times.shape) < 0.3] = np.nan
    times[0] = np.nan
    found = first_of_each(watched(times))
    assert set(found) == set(range(1, MANY))
    with pytest.raises(ValueError, match="measures of work"):
        Detector(1, work=1).feed(0, np.ones(1))
    with pytest.raises(ValueError, match="above 0"):
        Detector(1, alarms=0)
    assert math.isnan(Detector(1).level[0])
