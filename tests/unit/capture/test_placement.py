"""Which functions of a file are probed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture import placement as module
from argus.capture.attachment import Attachment
from argus.capture.placement import Placement
from argus.model import calls
from argus.model.errors import ArgusError


def one_by_one(attachment: Any, without: set[str]) -> list[tuple[calls.Call, int]]:
    """As it was before all functions were read at once."""
    library, taken, chosen = attachment.library, set(), []
    for symbol, offset in sorted(library.offsets.items(), key=lambda item: calls.BY_SYMBOL[item[0]].id):
        call = calls.BY_SYMBOL[symbol]
        if call.kind in without or offset in taken:
            continue
        taken.add(offset)
        chosen.append((call, offset))
    return chosen


def test_the_functions_are_those_that_were_chosen_one_by_one() -> None:
    random.seed(7)
    symbols, kinds = list(calls.BY_SYMBOL), sorted({call.kind for call in calls.CALLS})
    for _ in range(300):
        some = random.sample(symbols, random.randrange(1, len(symbols)))
        offsets = {symbol: random.randrange(1, 100) for symbol in some}
        library = SimpleNamespace(offsets=offsets)
        attachment: Any = SimpleNamespace(library=library)
        without = set(random.sample(kinds, random.randrange(3)))
        assert Placement._functions(attachment, without) == one_by_one(attachment, without)


class Maps:
    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(set=lambda key, value: None, delete=lambda key: True)


def placement() -> Placement:
    module: Any = Maps()
    prices: Any = SimpleNamespace(of=lambda code: 1, cheap=2, exit=1)
    return Placement(module, prices, launch_durations=False)


CODE: Any = SimpleNamespace(unread=False, look_ahead=list, follow=list, at=lambda offset: b"")


@pytest.mark.parametrize("symbol", calls.BY_SYMBOL)
def test_what_needs_a_slot_is_not_probed_without(symbol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In part it would have to be taken off again for who maps it later: a neighbour can make that last."""
    monkeypatch.setattr(module, "FILE_SLOTS", 1)
    placed, call = placement(), calls.BY_SYMBOL[symbol]
    library: Any = SimpleNamespace(key=1, shown_path="a file", text_bytes=1, offsets={symbol: 64})
    made = Attachment(library, None)
    if call.program == "torch" or call.shape is calls.Shape.ATTENTION:
        with pytest.raises(ArgusError, match="a file is not probed: there is room for no more files of its user"):
            placed.choose(made, {}, CODE, (), False, (0, ""))
        placed.release(made)
        placed.links.give_back(made)
        assert not placed.links._of_owner
    else:
        placed.choose(made, {}, CODE, (), False, (0, ""))
        assert made.lacks_slot
        assert made.functions == [symbol]


def test_a_file_that_could_not_be_read_says_so() -> None:
    nothing: Any = None
    placed = Placement(Maps(), nothing, launch_durations=False)  # type: ignore[arg-type]
    for unread in (False, True):
        library: Any = SimpleNamespace(key=unread, layout=None, text_bytes=1, offsets={})
        made = Attachment(library, None)
        code: Any = SimpleNamespace(unread=unread, look_ahead=list, follow=list)
        placed.choose(made, {}, code, (), False, (0, ""))
        assert made.lacks_code == unread
