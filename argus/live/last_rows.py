"""Rows that are not stored yet when a trace ends: they are stored, or written to disk."""

from __future__ import annotations

from collections import Counter as Tally

from argus.live.session import Session


class LastRows:
    """Stores the last rows of a trace, or brings them to disk.

    Args:
        session: The trace.

    Attributes:
        error: Why rows could not be stored; empty: all were.
        dropped: How many of each table were lost, by counter.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.error = ""
        self.dropped: Tally[str] = Tally()

    def store(self) -> None:
        """Stores what is left, and records what could not be."""
        writer = self._session.writer
        report = writer.close()
        for table, rows in report.dropped.items():
            self.dropped[f"rows_dropped_{table}"] = rows
        if report.dropped:
            self.error = report.last_error or "the store was away for too long"
        elif report.on_disk:
            self.error = (
                f"{sum(report.on_disk.values()):,} rows wait in {writer.spilled_to} for the store:"
                f" {report.last_error or 'it was away'}. `argus store load` stores them, as does the next trace"
            )

    def give_up(self, timeout_s: float) -> str:
        """As ``Tracer.give_up``."""
        writer = self._session.writer
        on_disk, lost = writer.give_up(timeout_s)
        parts = []
        if on_disk:
            parts.append(
                f"{on_disk:,} rows wait in {writer.spilled_to}: the next trace, or `argus store load`, stores them"
            )
        if lost:
            parts.append(f"{lost:,} rows are lost")
        return "argus: given up: " + ("; ".join(parts) or "nothing that was recorded is lost")
