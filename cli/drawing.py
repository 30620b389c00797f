"""Amounts, sparklines and bars as the live view writes them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"
FLAT = 1.5
"""A sparkline's top is at least so many times its bottom: noise of a few percent stays a line."""
SPIKE = 4.0
"""Steps above so many medians are drawn as high as that."""
GLYPHS = {
    "computing": ("█", "green"),
    "waiting": ("▒", "yellow"),
    "data loading": ("▓", "magenta"),
    "other": ("·", "dim"),
}
"""How each part of a rank's time is drawn: distinguishable without colours, too."""
_ASCII = str.maketrans(
    dict(zip(SPARKS, "_..--==#", strict=True))
    | {"█": "#", "▒": "=", "▓": "%", "·": ".", "→": ">", "…": "~", "µ": "u", "↑": "^", "↓": "v", "×": "x", "–": "-"}
)


def wrapped(text: str, width: int, *, first: str = "", rest: str = "", most: int = 0) -> list[str]:
    """Text in lines of ``width``; ``first`` and ``rest`` begin its lines. ``most``: lines at most, the last one ends in
    "…" if there were more; 0: all."""
    lines = textwrap.wrap(
        text, max(width, 8), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    ) or [first]
    if most and len(lines) > most:
        lines = lines[:most]
        lines[-1] = lines[-1][: max(width, 8) - 1] + "…"
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of blocks, one a value; where that is too many for the width, one for the mean of some."""
    if width <= 0 or not len(values):
        return ""
    each = -(-len(values) // width)
    shown = np.asarray(values[len(values) % each :], np.float64).reshape(-1, each).mean(axis=1)
    shown = np.minimum(shown, SPIKE * np.median(shown))
    low = float(shown.min())
    high = max(float(shown.max()), FLAT * low, 1e-9)
    places = np.clip((shown - low) / (high - low) * len(SPARKS), 0, len(SPARKS) - 1).astype(int)
    return "".join(SPARKS[place] for place in places.tolist())


def bar(parts: Mapping[str, float], width: int) -> Text:
    """Shares as a bar: as many cells as their sum has room for, each part rounded so that they add up."""
    out = Text()
    done, filled = 0.0, 0
    for part, (glyph, style) in GLYPHS.items():
        done += max(parts.get(part, 0.0), 0.0)
        upto = min(round(done * width), width)
        out.append(glyph * (upto - filled), style)
        filled = max(upto, filled)
    return out


def plain_ascii(text: str) -> str:
    """The same text for terminals without Unicode."""
    return re.sub(r"[^\x00-\x7f]", "?", text.translate(_ASCII))
