"""History: every run's results in the tables ``health`` and ``health_figures``.

Rows go to disk first (``argus.store.spill``), then to the store: a store that is away, slow or hanging costs a run
nothing but its time limit, and loses nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argus.health import isolate
from argus.health.config import Settings
from argus.health.run import Run
from argus.model.errors import ArgusError
from argus.model.units import binary_size, seconds

EMBEDDED_EVERY_S = 3600.0
"""An embedded store is opened only so often: starting its engine costs more than all checks. ``argus health --trend``,
``report`` and ``argus store load`` store what waits."""


def keep(run: Run, settings: Settings) -> str:
    """Stores a run, in a process of its own. Returns what became of it, in words; it never fails."""
    task = isolate.Task("history", lambda note: _stored(run, settings, note), settings.store_s)
    # The engine of an embedded store lives on for a while, for the next client.
    outcome = isolate.run_all([task], settings.store_s, sweep=False)["history"]
    return f"history: {outcome.error}" if outcome.error else str(outcome.value)


def rows(run: Run) -> dict[str, dict[str, Any]]:
    """A run as columns of the tables."""
    at = int(run.at * 1e9)
    results = [(r.name, r.status, r.text, r.hint, r.facts, int(r.seconds * 1e9)) for r in run.results]
    cost = f"{seconds(run.wall_s)}, {seconds(run.cpu_s)} of CPU, {binary_size(run.rss_bytes)}"
    results.append(("argus", run.status, cost, "", {}, int(run.wall_s * 1e9)))
    names, statuses, texts, hints, facts, took = (list(column) for column in zip(*results, strict=True))
    figures = [(r.name, *key.partition("/")[::2], value) for r in run.results for key, value in r.figures.items()]
    figures += [("argus", "cpu_s", "", run.cpu_s), ("argus", "rss_bytes", "", float(run.rss_bytes))]
    checks, figure, devices, values = (list(column) for column in zip(*figures, strict=True))
    common = {"host": run.host, "ts": at, "kind": run.kind}
    columns = {"check": names, "status": statuses, "text": texts, "hint": hints, "facts": facts, "duration_ns": took}
    measured = {"check": checks, "figure": figure, "device": devices, "value": values}
    return {"health": {**common, **columns}, "health_figures": {**common, **measured}}


def _stored(run: Run, settings: Settings, note: Callable[..., None]) -> str:
    try:
        return _store(run, settings, note)
    except ArgusError as failure:
        return f"history: {failure.message}"
    except OSError as failure:
        return f"history: {failure.filename or 'its file'}: {failure.strerror}"


def _store(run: Run, settings: Settings, note: Callable[..., None]) -> str:
    from argus.store import spill
    from argus.store.arrow import to_arrow
    from argus.store.open import open_store
    from argus.store.url import parse_url
    from argus.store.writer import Writer

    target = parse_url(settings.store or None)
    place = spill.place(target)
    session = uuid.uuid4().hex
    if place is None:
        note(f"writing to {target.url}")
        with open_store(settings.store or None) as store:
            writer = Writer(store, source=f"health/{run.host}")
            for table, columns in rows(run).items():
                writer.append(table, columns)
            lost = writer.close(settings.store_s / 2)
        return f"history: {lost.last_error}" if lost.dropped else "stored"
    if spill.waiting(place.folder).bytes > place.max_bytes:
        return f"history: {place.folder} is full, and the store away"
    note(f"writing to {place.folder}")
    folder = spill.create(place, session)
    try:
        for table, columns in rows(run).items():
            folder.write(table, f"health/{run.host}/{session}/{table}", to_arrow(table, columns), sent_s=0.0)
    finally:
        folder.close()
    if target.path and _oldest_s(place.folder) < EMBEDDED_EVERY_S:
        return "kept on disk"
    note(f"storing in {target.url}")
    try:
        load(settings)
    except ArgusError as failure:
        return f"kept on disk: {failure.message}"
    return "stored"


def load(settings: Settings, *, create: bool = True) -> None:
    """Stores what waits on disk.

    Raises:
        ArgusError: The store cannot be reached.
    """
    from argus.store import spill
    from argus.store.load import load_spilled
    from argus.store.open import open_store
    from argus.store.schema import ensure_schema
    from argus.store.url import parse_url

    place = spill.place(parse_url(settings.store or None))
    if place is None or not spill.waiting(place.folder).files:
        return
    with open_store(settings.store or None, create=create) as store:
        ensure_schema(store, timeout_s=settings.store_s / 2)
        load_spilled(store, place.folder)


def _oldest_s(folder: Path) -> float:
    """How long the oldest batch has waited, s."""
    oldest = time.time()
    for file in folder.glob("*/*.arrow"):
        try:
            oldest = min(oldest, file.stat().st_mtime)
        except OSError:
            continue  # another writer stored it
    return time.time() - oldest
