"""What is written to the kernel's table of prices."""

from __future__ import annotations

import random
from collections import Counter as Tally
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.call_prices import REFILL, TrapPrices
from argus.model.calls import CALLS, FILE_SLOTS
from argus.model.records import PRICES

LAST = FILE_SLOTS - 1


def one_by_one(table: dict[int, int], attachments: Any, entries: Any) -> None:
    """All files without a slot are gone through for each new one: they have the least of their prices."""
    shared: dict[int, int] = {}
    for attachment in attachments:
        for call, whole in attachment.prices.items():
            price = attachment.entry_prices[call] if entries(call) else whole
            if attachment.slot == LAST:
                price = shared[call] = min(shared.get(call, price), price)
            table[attachment.slot << 8 | call] = price + int(REFILL[call])


def a_file(draw: random.Random, functions: int) -> Any:
    chosen = [call.id for call in draw.sample(CALLS, functions)]
    prices = {call: draw.randrange(1, 5000) for call in chosen}
    slot = draw.choice([0, 1, 2, LAST, LAST])
    entries = {call: price // 2 for call, price in prices.items()}
    return SimpleNamespace(prices=prices, entry_prices=entries, slot=slot, has_slot=slot != LAST)


@pytest.mark.parametrize("seed", range(20))
def test_the_table_is_the_one_that_was_written_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    table, expected, files = dict[int, int](), dict[int, int](), list[Any]()
    alone = {call.id for call in CALLS if draw.random() < 0.3}
    writes: Any = SimpleNamespace(set=table.__setitem__)
    prices = TrapPrices(writes, writes, lambda: files, lambda call: call in alone)
    for _ in range(30):
        if draw.random() < 0.2:  # a plan changes
            alone ^= {call.id for call in CALLS if draw.random() < 0.3}
            prices.write()
            one_by_one(expected, files, alone.__contains__)
        else:
            files.append(a_file(draw, draw.randrange(1, 9)))
            prices.write(files[-1:])
            one_by_one(expected, [files[-1], *(each for each in files if not each.has_slot)], alone.__contains__)
        assert table == expected


def test_a_new_file_costs_its_own_prices_alone() -> None:
    """Each wrote those of all files that share the last slot: 131 ms for 89 of them."""
    draw, times = random.Random(1), Tally[int]()
    files = [a_file(draw, 200) for _ in range(300)]
    writes: Any = SimpleNamespace(set=lambda place, price: times.update([place]))
    prices = TrapPrices(writes, writes, lambda: files, lambda call: False)
    prices.write(files[:1])
    assert times.total() == 200
    times.clear()
    prices.write()
    assert max(times.values()) == 1, "all files: each place once"


@pytest.mark.parametrize("seed", range(20))
def test_owners_pay_for_their_own_files(seed: int) -> None:
    """In the last slot each pays the highest price of the files that it maps, and none of those that others map."""
    draw = random.Random(seed)
    rows, files = dict[int, bytes](), [a_file(draw, draw.randrange(1, 9)) for _ in range(6)]
    alone = {call.id for call in CALLS if draw.random() < 0.3}
    table: Any = SimpleNamespace(set=lambda place, price: None)
    of_owners: Any = SimpleNamespace(set=rows.__setitem__)
    prices = TrapPrices(table, of_owners, lambda: files, lambda call: call in alone)
    for _ in range(20):
        own = {number: draw.sample(files, draw.randrange(1, 4)) for number in draw.sample(range(1, 6), 3)}
        prices.share({number: {id(file): file for file in each} for number, each in own.items()})
        if draw.random() < 0.3:
            alone ^= {call.id for call in CALLS if draw.random() < 0.3}
            prices.write()
        for number in range(1, 6):
            expected = np.zeros(256, np.int64)
            for file in own.get(number, []):
                for call, whole in file.prices.items():
                    price = file.entry_prices[call] if call in alone else whole
                    expected[call] = max(expected[call], price + REFILL[call])
            found = np.frombuffer(rows.get(number, bytes(1024)), PRICES)["of"][0]
            assert (found == expected).all()


def test_files_that_many_owners_map_are_looked_up_once() -> None:
    """32 containers that map 2,048 files held the loop for four seconds, whenever other calls were probed."""
    draw, looked = random.Random(3), Tally[int]()

    class Looked(dict[int, int]):
        def __getitem__(self, call: int) -> int:
            looked[id(self)] += 1
            return super().__getitem__(call)

    files = [a_file(draw, 50) for _ in range(40)]
    for file in files:
        file.prices = Looked(file.prices)
    writes: Any = SimpleNamespace(set=lambda place, price: None)
    prices = TrapPrices(writes, writes, list, lambda call: False)
    prices.share({number: {id(file): file for file in files} for number in range(1, 33)})
    assert set(looked.values()) == {50}
    looked.clear()
    prices.share({number: {id(file): file for file in reversed(files)} for number in range(1, 33)})
    assert not looked, "nothing is another"
    prices.write()
    assert set(looked.values()) == {50}
