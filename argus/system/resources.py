"""Finds the files that ship with Argus but are not Python: BPF sources, stub headers, SQL schemas."""

from __future__ import annotations

from pathlib import Path

from argus.model.errors import ArgusError

_PACKAGE = Path(__file__).resolve().parents[1]


def resource_dir(name: str) -> Path:
    """The directory ``name`` ("bpf" or "schemas").

    In a wheel it lies inside the package; in a source tree or an editable install, beside it.

    Raises:
        ArgusError: The installation lacks the directory.
    """
    for candidate in (_PACKAGE / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise ArgusError(f"this installation of Argus lacks its '{name}' directory", "Install it again")
