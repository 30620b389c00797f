"""Links of rings: the bandwidth between neighbours in a collective's ring."""

from __future__ import annotations

from argus.report.arrays import Arrays
from argus.report.look import Look, absent
from argus.report.panel import Panel

ID = "links"
TITLE = "Links of rings"


def build(look: Look, arrays: Arrays) -> Panel:
    """Absent: which ranks are neighbours in a ring, and how fast each link is, no table holds yet."""
    return absent(
        ID, TITLE, "rings of NCCL and the speed of their links are not recorded; communicators above have what is known"
    )
