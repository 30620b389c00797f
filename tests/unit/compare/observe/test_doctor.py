"""What disturbs a machine, from made-up figures."""

from __future__ import annotations

import pytest

from argus.compare.observe.doctor import LOOP_S, LOOPS, Item, examine, quiet, time_loops

CALM = {"others_cpu_share": 0.01, "steal_share": 0.0, "throttled_share": 0.0, "load_before": 0.1}
FACTS = {"cpu.governor": "performance", "cpu.smt": "off"}
EVEN = [0.02, 0.0201, 0.0199] * 10


def found(loops: list[float] = EVEN, facts: dict[str, str] = FACTS, **noise: float | None) -> dict[str, Item]:
    items = examine(loops, {**CALM, **noise}, facts, 4, [("stress", 0.9)])
    return {item.name: item for item in items}


def test_a_quiet_machine() -> None:
    items = found()
    assert {item.level for item in items.values()} == {"ok"}
    assert quiet(list(items.values()))


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("others", {"others_cpu_share": 0.2}),
        ("steal", {"steal_share": 0.05}),
        ("cgroup", {"throttled_share": 0.05}),
    ],
)
def test_what_disturbs(name: str, noise: dict[str, float]) -> None:
    items = found(**noise)
    assert items[name].level == "disturbs"
    assert items[name].hint
    assert not quiet(list(items.values()))


def test_a_loop_that_varies_disturbs_whatever_the_reason() -> None:
    items = found([0.02, 0.03, 0.02, 0.025] * 10)
    assert items["loop"].level == "disturbs"
    assert "vary by 17.7%" in items["loop"].text


def test_what_need_not_disturb_is_noted() -> None:
    items = found(facts={"cpu.governor": "powersave", "cpu.smt": "on"}, load_before=3.0)
    assert [items[name].level for name in ("governor", "smt", "load")] == ["noted"] * 3
    assert quiet(list(items.values()))


def test_what_is_not_known_is_not_ok() -> None:
    items = found(facts={}, others_cpu_share=None, steal_share=None, throttled_share=None, load_before=None)
    assert {name for name, item in items.items() if item.level == "unknown"} == set(items) - {"loop"}


def test_loops_are_made_to_take_a_given_time() -> None:
    """With a clock that goes on by 1 ms whenever it is read, a loop takes 1 ms: it is doubled, up to a bound."""
    calls = iter(range(10**9))
    speed = iter([LOOP_S / 8, LOOP_S / 3])
    now = [0.0]

    def clock() -> float:
        if next(calls) % 2:
            now[0] += next(speed, LOOP_S)
        return now[0]

    loops = time_loops(clock, 5)
    assert loops == pytest.approx([LOOP_S] * 5)
    assert LOOPS > 20
