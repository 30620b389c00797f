"""From a store to a page: the verdict, and every panel in order."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, cast

from argus import __version__
from argus.diagnose.case import HANG_S, THRESHOLD
from argus.diagnose.read.query import quoted
from argus.diagnose.stored import Examined, examine_store
from argus.diagnose.verdict import Verdict
from argus.model.errors import ArgusError
from argus.model.units import seconds
from argus.report.arrays import Arrays
from argus.report.look import LONG_NAME, LONG_SQL, Look, absent, bounded
from argus.report.panel import PAGE_SCHEMA, Page, Panel, PanelModule
from argus.report.panels.order import PANELS
from argus.report.summary import summary_of
from argus.store.open import Store
from argus.system import debug

Progress = Callable[[str, float], None]
LONGEST = 4_000
"""Characters of a text of the verdict that is no query."""


def build_page(
    store: Store,
    job: str,
    run: int,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    since_ns: int = 0,
    threshold: float = THRESHOLD,
    hang_after_s: float = HANG_S,
    keep: bool = True,
    live: bool = False,
    progress: Progress | None = None,
    examined: Examined | None = None,
) -> tuple[Page, bytes]:
    """The page of a run, and its arrays as :meth:`argus.report.arrays.Arrays.packed` returns them.

    Args:
        store: The store.
        job, run: Which run.
        steps: First and last step that are shown; None: as stored.
        since_ns: Only what came later, wall time.
        threshold, hang_after_s, keep: As for :func:`argus.diagnose.stored.diagnose_store`.
        live: The page comes from a server, and may ask for more.
        progress: Called with what is worked on, and what part of all is done.
        examined: The verdict, if it was reached before; None: it is reached here.

    Raises:
        ArgusError: The run cannot be diagnosed: the store cannot be reached.
    """
    say = progress or (lambda what, part: None)
    say("diagnosing", 0.0)
    if examined is None:
        examined = examine_store(
            store, job, run, steps=steps, threshold=threshold, hang_after_s=hang_after_s, keep=keep, since_ns=since_ns
        )
    look, arrays = Look(store, job, run, since_ns, examined), Arrays()
    panels = []
    for number, module in enumerate(PANELS):
        say(module.TITLE, (number + 1) / (len(PANELS) + 1))
        panels.append(built(module, look, arrays))
    begin_ns, end_ns = look.window_ns
    first, last = (look.steps[0], look.steps[1]) if look.steps else (None, None)
    page: Page = {
        "schema": PAGE_SCHEMA,
        "argus": __version__,
        "job": bounded(job),
        "run": run,
        "made_ns": str(time.time_ns()),
        "live": live,
        "window": {"first_step": first, "last_step": last, "begin_ns": str(begin_ns), "end_ns": str(end_ns)},
        "summary": bounded(summary_of(examined.verdict), 600),
        "verdict": _limited(examined.verdict, look),
        "panels": panels,
    }
    say("compressing", 1.0)
    return page, arrays.packed()


def look_at(
    store: Store, job: str, run: int, *, steps: tuple[int | None, int | None] = (None, None), keep: bool = True
) -> Look:
    """What the panels of a run are built from.

    Raises:
        ArgusError: As :func:`build_page`.
    """
    return Look(store, job, run, 0, examine_store(store, job, run, steps=steps, keep=keep))


def built(module: PanelModule, look: Look, arrays: Arrays) -> Panel:
    """A panel; one that fails is absent with the reason, so that the others stay."""
    began = time.monotonic()
    try:
        return module.build(look, arrays)
    except ArgusError as failure:
        debug.note(f"panel {module.ID}: {failure}")
        return absent(module.ID, module.TITLE, f"it could not be read: {failure.message}")
    except Exception as failure:  # a defect, or rows that somebody else has written
        debug.note(f"panel {module.ID} failed: {type(failure).__name__}: {failure}")
        where = debug.traceback_of(failure)
        return absent(module.ID, module.TITLE, f"it could not be made ({type(failure).__name__}). {where}")
    finally:
        debug.note(f"panel {module.ID}: {seconds(time.monotonic() - began)}")


def _limited(verdict: Verdict, look: Look) -> dict[str, Any]:
    """The verdict with texts of bounded length; queries stay whole. The name of a job may have a megabyte, and is in
    each query."""
    literal = quoted(look.job)
    by_hash = look.sql("", "{job:String}")["text"]

    def limited(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {str(name)[:LONGEST]: limited(each, str(name)) for name, each in value.items()}
        if isinstance(value, list):
            return [limited(each, key) for each in value]
        if not isinstance(value, str):
            return value
        if key != "sql":
            return bounded(value, LONGEST) if key != "job" else bounded(value)
        if len(look.job) > LONG_NAME:
            value = value.replace(literal, by_hash)
        return value if len(value) <= LONG_SQL else re.sub(r"\s+", " ", value[:LONGEST]) + " …"

    return cast("dict[str, Any]", limited(dict(verdict), ""))
