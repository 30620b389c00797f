"""What symbols of a process may take in all, and that honest ones get their names as before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from argus.capture.process import demangler
from argus.capture.process.demangler import SAVED_S, STRIKES, Demangler, is_small


class Clock:
    """Stands for the module ``time``, and for the child: an answer takes its time."""

    def __init__(self, answer_s: float = 0.0, cpu_s: float = 0.0) -> None:
        self.now, self.cpu = 1000.0, 0.0
        self.answer_s, self.cpu_s, self.asked = answer_s, cpu_s, 0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu

    def begin(self) -> None:
        """Of the child."""

    def ask(self, symbols: Sequence[str]) -> list[tuple[str | None, float]]:
        """As ``Child.ask``."""
        self.asked += len(symbols)
        self.now += self.answer_s * len(symbols)
        return [(f"name of {symbol}", self.cpu_s) for symbol in symbols]


def demangler_at(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Demangler:
    monkeypatch.setattr(demangler, "time", clock)
    made = Demangler()
    made._child = clock  # type: ignore[assignment]
    return made


def large(number: int, first: int = 0) -> list[str]:
    found = [f"_Z{len(str(which)) + 3}fun{which}IiE" + 20 * "S0_" for which in range(first, first + number)]
    assert not any(map(is_small, found))
    return found


def test_symbols_of_a_process_have_a_second_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(answer_s=0.008, cpu_s=0.008)
    names = demangler_at(monkeypatch, clock)
    symbols = large(4000)
    found = names.names(symbols, 7)
    assert clock.asked * clock.answer_s < SAVED_S + 0.1, "not 32 s"
    assert found[: clock.asked] == [f"name of {symbol}" for symbol in symbols[: clock.asked]]
    assert found[clock.asked :] == symbols[clock.asked :]
    assert names.given_up == 4000 - clock.asked
    before = clock.asked
    assert names.names(symbols[-1:], 8) == [f"name of {symbols[-1]}"], "another process has its own time"
    clock.now += 10.0
    again = names.names(large(4000, 5000), 7)
    assert 0.4 < (clock.asked - before) * clock.answer_s < 0.7, "a twentieth of the time is given back"
    assert again[0].startswith("name of ")


def test_small_symbols_of_a_process_have_a_second_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = Clock(), []

    def here(symbol: str) -> str:
        done.append(symbol)
        clock.cpu += 0.001
        return "short"

    names = demangler_at(monkeypatch, clock)
    monkeypatch.setattr(demangler, "_demangle_here", here)
    symbols = [f"_Z1f{number}" for number in range(50_000)]
    found = names.names(symbols, 7)
    assert len(done) < 1.1 * SAVED_S / 0.001
    assert found[len(done) :] == symbols[len(done) :]
    assert set(found[: len(done)]) == {"short"}


def test_slow_symbols_are_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(answer_s=0.03, cpu_s=0.03)
    names = demangler_at(monkeypatch, clock)
    symbols = large(400)
    found = names.names(symbols, 7)
    assert clock.asked == demangler._SYMBOLS_AT_ONCE, "the first that were sent"
    assert clock.asked >= STRIKES
    assert found[0] == f"name of {symbols[0]}"
    assert names.given_up == 400 - clock.asked
    clock.now += 1000.0
    assert names.names(large(1, 999), 7) == large(1, 999)
    names.forget(7)
    assert names.names(large(1, 999), 7) != large(1, 999)


def test_a_child_that_is_starved_strikes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(answer_s=0.1, cpu_s=0.0)
    names = demangler_at(monkeypatch, clock)
    assert names.names(large(8), 7) == [f"name of {symbol}" for symbol in large(8)]
    assert not names._strikes[7]


def test_a_busy_node_takes_half_of_what_it_makes_a_process_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(answer_s=0.001, cpu_s=40e-6)
    names = demangler_at(monkeypatch, clock)
    assert names.names(large(1900), 7) == [f"name of {symbol}" for symbol in large(1900)]
    assert names.given_up == 0
    calm = Clock(answer_s=40e-6, cpu_s=40e-6)
    names = demangler_at(monkeypatch, calm)
    names.names(large(100), 7)
    assert names._left_s(7) == pytest.approx(SAVED_S - 100 * 40e-6, rel=0.01), "a calm one all"


@pytest.mark.parametrize("cpu_s", [0.0, 40e-6, 0.005])
def test_who_starves_the_child_holds_the_loop_for_two_seconds(monkeypatch: pytest.MonkeyPatch, cpu_s: float) -> None:
    clock = Clock(answer_s=0.02, cpu_s=cpu_s)
    names = demangler_at(monkeypatch, clock)
    begun = clock.now
    names.names(large(4000), 7)
    waited_s = clock.now - begun
    assert waited_s < demangler.WAITED * SAVED_S * (1 + demangler.REFILL * 3) + demangler.WAIT_S
    assert names.given_up > 3000


def test_names_of_any_mixture_are_those_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as honest programs have, in any order and with repetitions: the same as each alone."""
    rng = random.Random(5)
    clock = Clock(answer_s=40e-6)
    names = demangler_at(monkeypatch, clock)
    small = [f"_ZN3foo{len(str(number)) + 3}bar{number}Ev" for number in range(300)]
    plain = ["main", "", "triton_poi_fused_0", "_Z\0", "_Z" + "x" * demangler.MAX_SYMBOL, "y" * 5000]
    symbols = rng.choices([*small, *large(300), *plain], k=5000)
    expected = {
        symbol: f"name of {symbol}" if symbol in set(large(300)) else f"foo::bar{symbol[10:-2].lstrip('r')}()"
        for symbol in (*small, *large(300))
    }
    expected |= {symbol: demangler.shortened(symbol, symbol) for symbol in plain}
    found: list[str] = []
    for first in range(0, 5000, 250):
        found += names.names(symbols[first : first + 250], rng.randrange(3))
    assert found == [expected[symbol] for symbol in symbols]
    assert names.given_up == 0


def test_who_waits_for_the_child_has_it_on_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(answer_s=0.001)
    monkeypatch.setattr(demangler, "_waits", SimpleNamespace())
    assert demangler.waits_s() == 0
    demangler_at(monkeypatch, clock).names(large(100), 7)
    assert demangler.waits_s() == pytest.approx(0.1)
