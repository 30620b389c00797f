"""Files get what the best placed of those who map them may have, whoever mapped them first."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.attachment import Attachment
from argus.capture.process.pytorch import LAYOUTS
from argus.capture.process.targets import TORCH
from argus.live.cost.file_users import _ATTENTION, AGAIN_S, FileUsers
from argus.model.errors import ArgusError
from argus.model.losses import Owner

EVIL, HONEST, OTHER = (65534, ""), (1000, ""), (1001, "")


class Session:
    """Slots for some owners; probes that go when they are let."""

    def __init__(self, *may: Owner) -> None:
        self.kept: list[Any] = []
        self.priced: list[Any] = []
        self.asked: list[Owner] = []
        self.closing = SimpleNamespace(gone=False, wait=lambda seconds: self.closing.gone)
        self.lost: list[tuple[int, int]] = []

        def keep(library: Any, owner: Owner) -> bool:
            self.asked.append(owner)
            if owner in may:
                self.kept.append(library.key)
            return owner in may

        self.probes = SimpleNamespace(
            placement=SimpleNamespace(keep=keep, let_go=lambda library: self.kept.remove(library.key)),
            release=lambda files: self.closing,
            price_without_slots=self.priced.append,
        )
        self.losses = SimpleNamespace(count=lambda name, pid, *, number: self.lost.append((pid, number)))
        self.whom = lambda pid: pid


def a_file(n: int = 1, **more: Any) -> Any:
    values: dict[str, Any] = {"key": ("08:01", n, 1, 1), "roles": (), "offsets": {}, "layout": None, **more}
    return SimpleNamespace(**values)


def a_user(pid: int, owner: Owner, *files: Any) -> Any:
    return SimpleNamespace(pid=pid, libraries=files, alive=lambda: True, identity=SimpleNamespace(owner=owner))


def poor(files: Iterable[Any]) -> list[Attachment]:
    return [Attachment(each, None, lacks_slot=True) for each in files]


def test_a_file_is_probed_anew_for_who_may_have_a_slot() -> None:
    session: Any = Session(HONEST)
    users, files = FileUsers(session), [a_file(n) for n in range(5)]
    attached = poor(files)
    evil = a_user(1, EVIL, *files)
    assert users.improve([evil], attached, {}) == []
    assert session.asked == [EVIL], "who is refused once is not asked for in that turn again"
    users.note_poor([evil], attached, {})
    (better,) = users.improve([evil, a_user(2, HONEST, files[3]), a_user(3, OTHER, files[3])], attached, {})
    assert better is attached[3]
    assert session.kept == [files[3].key]
    assert session.lost == [(1, 1)], "of those that had its probes"
    # The new ones wait for the old ones, as do those of a file that may be the same.
    attached.remove(better)
    both = {EVIL: 1, HONEST: 2}
    assert [*users.in_order((files[3].key, None), both)] == [HONEST, EVIL]
    assert [*users.in_order((files[2].key, None), both)] == [EVIL, HONEST]
    made = Attachment(files[3], None)
    assert users.after_old_probes(("08:01", 9, 2, 2), lambda: made)() is made
    with pytest.raises(ArgusError, match="do not go"):
        users.after_old_probes(("00:2a", 9, 1, 1), lambda: made)()
    users.settle(attached, {(files[3].key, None)})
    users.settle([*attached, made], ())
    assert session.kept == [files[3].key]
    session.closing.gone = True
    assert users.after_old_probes(files[3].key, lambda: made)() is made
    users.settle([*attached, made], ())
    assert session.kept == []
    users.note_poor([evil], [made], {})
    assert not users._poor
    assert not users._anew


def test_a_file_that_nobody_maps_by_its_own_name_stays() -> None:
    """It could not be probed anew: an overlay shows it to others by another name."""
    session: Any = Session(HONEST)
    users, file, twin = FileUsers(session), a_file(1), a_file(2)
    twins = {twin.key: file.key}
    attached = poor([file])
    assert users.improve([a_user(2, HONEST, twin)], attached, twins) == []
    assert users.improve([a_user(2, HONEST, twin), a_user(1, EVIL, file)], attached, twins) == attached


def test_a_file_is_probed_anew_for_who_shows_how_tensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    session: Any = Session(EVIL, HONEST)
    users, offsets = FileUsers(session), dict.fromkeys(_ATTENTION, 1)
    theirs = a_file(roles=(TORCH[0],), offsets=offsets)
    own = a_file(roles=(TORCH[0],), offsets=offsets, layout=LAYOUTS["x86_64", 2, 8])
    attached = [Attachment(theirs, None, has_slot=True)]
    assert users.improve([a_user(1, EVIL, theirs)], attached, {}) == []
    both = [a_user(1, EVIL, theirs), a_user(2, HONEST, own)]
    assert users.improve(both, attached, {}) == attached
    assert [*users.in_order((theirs.key, None), {EVIL: 1, HONEST: 2})] == [HONEST, EVIL]
    assert users.improve(both, attached, {}) == [], "not all the time, should it fail"
    now += AGAIN_S
    assert users.improve(both, attached, {}) == attached
    assert users.improve(both, [Attachment(theirs, None, has_slot=True, has_layout=True)], {}) == []
