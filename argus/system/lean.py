"""What commands of Argus do without, though it is installed.

pyarrow imports pandas, which chdb brings along, with the first array that it makes: 0.2 s of CPU time and 30 MB for
nothing (``/usr/bin/time argus diagnose``, with and without). It asks once, and goes on without.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

UNUSED = "pandas"


class _Without(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == UNUSED:
            raise ModuleNotFoundError(f"argus does without {UNUSED}", name=UNUSED)
        return None


def hide_pandas() -> None:
    """Hides pandas from this process. For Argus's own: a program that imports Argus may need it."""
    if UNUSED not in sys.modules:
        sys.meta_path.insert(0, _Without())


def unhide_pandas() -> None:
    """Undoes :func:`hide_pandas`, where others' code is run."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Without)]
