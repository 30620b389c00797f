"""Which functions of a file are probed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from argus.capture.attachment import Attachment
from argus.capture.placement import Placement
from argus.model import calls


def one_by_one(attachment: Any, without: set[str]) -> list[tuple[calls.Call, int]]:
    """As it was before all functions were read at once."""
    library, taken, chosen = attachment.library, set(), []
    for symbol, offset in sorted(library.offsets.items(), key=lambda item: calls.BY_SYMBOL[item[0]].id):
        call = calls.BY_SYMBOL[symbol]
        if call.kind in without or offset in taken:
            continue
        if call.shape is calls.Shape.ATTENTION and not (attachment.has_layout and attachment.has_slot):
            continue
        if call.program == "torch" and not attachment.has_slot:
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
        attachment: Any = SimpleNamespace(
            library=library, has_slot=random.random() < 0.5, has_layout=random.random() < 0.5
        )
        without = set(random.sample(kinds, random.randrange(3)))
        assert Placement._functions(attachment, without) == one_by_one(attachment, without)


def test_a_file_that_could_not_be_read_says_so() -> None:
    class Maps:
        def __getitem__(self, name: str) -> Any:
            return SimpleNamespace(set=lambda key, value: None)

    module: Any = Maps()
    nothing: Any = None
    placed = Placement(module, nothing, launch_durations=False)
    for unread in (False, True):
        library: Any = SimpleNamespace(key=unread, layout=None, text_bytes=1, offsets={})
        made = Attachment(library, None)
        code: Any = SimpleNamespace(unread=unread, look_ahead=list, follow=list)
        placed.choose(made, {}, code, (), False, (0, ""))
        assert made.lacks_code == unread
