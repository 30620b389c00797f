"""A job that stopped making steps: since when, in which collective, and who did not come to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from argus.diagnose import sql
from argus.diagnose.verdict import Evidence, Finding

HANG_S = 30.0
"""Silence that counts as a hang, s, or :data:`HANG_STEPS` if that is longer. A checkpoint or an evaluation that keeps
other ranks waiting for so long is worth the same look."""
HANG_STEPS = 20
"""Silence of so many typical steps."""
SURE, UNSURE = 0.9, 0.5
"""Confidence where the missing ranks are known, and where they are not."""


PAUSE_S = 5.0
"""Silence that keeps a verdict from being "healthy": more than the delay with which steps reach the store (2 s)."""


def find_hang(query: sql.Query, params: dict[str, Any], step_ns: float, after_s: float) -> tuple[Finding | None, str]:
    """Whether the job had stopped when Argus last looked at it.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        step_ns: A typical step.
        after_s: Silence that counts.

    Returns:
        The finding, if it had; and otherwise a sentence on why its last moments are in doubt (empty: it went on, every
        process of it had ended, or nothing tells when Argus last looked, as in an imported job).
    """
    seen = query(sql.LAST_LOOK, params)
    looked, stepped, called = (int(seen[name][0]) for name in ("looked_ns", "stepped_ns", "called_ns"))
    if looked == 0:
        return None, ""
    states = query(sql.STATES, params)
    gone = states["rank"][states["state"] == "exited"].astype(np.int64).tolist()
    if not len(states["rank"]) or len(gone) == len(states["rank"]):
        return None, ""  # it ended
    silent_s, stepless_s = (looked - max(stepped, called)) / 1e9, (looked - stepped) / 1e9
    usual_s = HANG_STEPS * step_ns / 1e9
    # Who has no process any more will never come: the others need not be waited for so long.
    if silent_s < max(min(after_s, PAUSE_S) if gone else after_s, usual_s):
        if gone and len(gone) < len(states["rank"]):
            return None, f"{_ranks(sorted(gone))} had no process any more when Argus looked last, while others ran on"
        if stepless_s < max(PAUSE_S, usual_s):
            return None, ""
        doing = "and no call was made" if silent_s > stepless_s / 2 else "though calls go on (an evaluation? a change?)"
        return (
            None,
            f"no step was seen for the last {stepless_s:.0f} s ({stepless_s * 1e9 / step_ns:.0f} usual steps), {doing}",
        )
    calls = query(sql.LAST_CALLS, params)
    missing: list[int] = []
    where = "a collective"
    if len(calls["rank"]):
        newest = int(calls["seq"].max())
        missing = sorted(calls["rank"][calls["seq"] < newest].astype(np.int64).tolist())
        where = f"{calls['call'][int(calls['seq'].argmax())]} {newest}"
    evidence: list[Evidence] = [
        {
            "text": f"no step has finished for {silent_s:.0f} s, where one took {step_ns / 1e6:.1f} ms",
            "sql": sql.shown(sql.LAST_LOOK, params),
        }
    ]
    if missing:
        others = sorted(set(calls["rank"].astype(np.int64).tolist()) - set(missing))
        evidence.append(
            {
                "text": f"{len(others)} ranks called {where} of their communicator; {_ranks(missing)} did not come",
                "sql": sql.shown(sql.LAST_CALLS, params),
            }
        )
        action = f"Look at {_ranks(missing)}: what its processes are doing (py-spy dump), its kernel log, its GPU."
    else:
        action = "All ranks came to the same call: look at the network and at NCCL's own log (NCCL_DEBUG=INFO)."
    missing = missing or sorted(gone)
    dead = sorted(set(missing) & set(gone))
    if dead:
        evidence.append({"text": f"{_ranks(dead)} has no process any more", "sql": sql.shown(sql.STATES, params)})
        action = f"Restart the job, and find out what ended {_ranks(dead)}: its log, the kernel log (OOM, XID)."
    hosts = {int(rank): str(host) for rank, host in zip(states["rank"], states["host"], strict=True)}
    last = int(params["last"])
    finding = Finding(
        kind="hang",
        ranks=missing,
        hosts=list(dict.fromkeys(hosts[rank] for rank in missing if rank in hosts)),
        steps=[last, last],
        phase="communication",
        kernels=[],
        slowdown=round(1 + silent_s * 1e9 / max(step_ns, 1.0), 4),
        share=1.0,
        confidence=SURE if missing else UNSURE,
        level="phase",
        evidence=evidence,
        action=action,
    )
    return finding, ""


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
