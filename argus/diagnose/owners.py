"""Who has to act on a finding: the kind's owner, or the one that this site names instead."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from argus.diagnose.kinds import EXPLANATIONS, OWNERS, explanation
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import named
from argus.system import toml

FILE = Path("/etc/argus/owners.toml")
"""Lines as ``host_contention = "infrastructure"``, one a kind."""


def owner_of(kind: str, derived: str = "") -> str:
    """Who has to act on a finding: one of :data:`argus.diagnose.kinds.OWNERS`.

    Args:
        kind: The finding's.
        derived: What its detector derived of this one; empty: the kind's owner. What the site names counts before both.

    Raises:
        ArgusError: The site's file cannot be read, or names what there is not.
    """
    explained = explanation(kind)
    return _of_the_site(FILE).get(kind) or derived or (explained.owner if explained is not None else "platform")


@cache
def _of_the_site(file: Path) -> dict[str, str]:
    hint = f'Lines look like: host_contention = "infrastructure"; owners are {", ".join(OWNERS)}'
    table = toml.read(file, hint, "Let those who diagnose read it")
    kinds = [explained.name for explained in EXPLANATIONS]
    for kind, owner in (table or {}).items():
        if kind not in kinds:
            near = difflib.get_close_matches(kind, kinds, 1)
            also = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(kinds)}"
            raise ArgusError(f"{file}: there is no kind of finding '{named(kind)}'", also, EXIT_USAGE)
        if not isinstance(owner, str) or owner not in OWNERS:
            raise ArgusError(f"{file}: there is no owner {named(repr(owner))} (of {kind})", hint, EXIT_USAGE)
    return table or {}
