"""Verdicts in the table ``findings``; and of a job that runs, more of its next moments."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from argus.diagnose.read import queries
from argus.diagnose.verdict import Status, Verdict, to_json
from argus.model.errors import ArgusError
from argus.store.flags import Flag, flag
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer

FLAGGED_NS = 5_000_000_000
"""How much of a running job's next moments is kept operation by operation once something was found, ns."""
FLAGGED_RANKS = 8
"""Of so many of the ranks found."""
COMPARED_RANKS = 16
"""And of so many others."""


def save(store: Store, verdict: Verdict, *, created_ns: int | None = None) -> None:
    """Adds a verdict to the table ``findings``: one row a finding, or one without kind where there is none.

    Raises:
        ArgusError: The store did not take it.
    """
    status: Status = verdict["status"]
    shared = {
        "job": verdict["job"],
        "run": verdict["run"],
        "created": time.time_ns() if created_ns is None else created_ns,
        "status": status,
    }
    steps = verdict["steps"] or [0, 0]
    rows: list[dict[str, Any]] = [
        {
            "kind": f["kind"],
            "ranks": f["ranks"],
            "hosts": f["hosts"],
            "step_from": f["steps"][0],
            "step_to": f["steps"][1],
            "phase": f["phase"],
            "slowdown": f["slowdown"],
            "share": f["share"],
            "confidence": f["confidence"],
            "evidence": to_json(f, indent=None),
            "action": f["action"],
        }
        for f in verdict["findings"]
    ] or [
        {
            "kind": "",
            "ranks": [],
            "hosts": [],
            "step_from": steps[0],
            "step_to": steps[1],
            "phase": "",
            "slowdown": verdict["slowdown"],
            "share": 0.0,
            "confidence": 0.0,
            "evidence": verdict["reason"],
            "action": "",
        }
    ]
    with Writer(store, source="diagnose") as writer:
        writer.append("findings", {**shared, **{name: [row[name] for row in rows] for name in rows[0]}})
        report = writer.close()
    if report.dropped:
        raise ArgusError(f"the verdict could not be stored: {report.last_error}", "Use --no-store to only print it")
    if verdict["findings"] and not verdict["coverage"]["ended"]:
        _keep_operations(store, verdict)


def _keep_operations(store: Store, verdict: Verdict) -> None:
    """Has the tracers of a job that runs keep every GPU operation of the next moment, of the ranks to be compared."""
    ranks_of_findings = sorted({rank for finding in verdict["findings"] for rank in finding["ranks"]})[:FLAGGED_RANKS]
    others = [rank for rank in range(verdict["ranks"]) if rank not in ranks_of_findings][:COMPARED_RANKS]
    now, kinds = time.time_ns(), dict.fromkeys(finding["kind"] for finding in verdict["findings"])
    wanted = Flag(now, now + FLAGGED_NS, (*ranks_of_findings, *others), ", ".join(kinds))
    job, run = verdict["job"], verdict["run"]
    # The verdict is there and stored; a store that is gone by now takes nothing from it.
    with contextlib.suppress(ArgusError):
        if not int(query_columns(store, queries.FLAGGED, {"job": job, "run": run})["n"][0]):
            flag(store, job, run, wanted)
