"""A threshold of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limit:
    """A threshold: its default, what it means, and why that value (or where it comes from)."""

    default: Any
    meaning: str
    source: str
