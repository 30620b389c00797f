"""The diagnosis of a run in a store, with the breakdown of its time where there is nothing else to report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from argus.diagnose.breakdown import breakdown
from argus.diagnose.case import HANG_S, THRESHOLD, Case, hosts_of
from argus.diagnose.causes.stacks import StackReader
from argus.diagnose.read.hosts import Hosts, align_hosts, prepare
from argus.diagnose.reason import NOTHING
from argus.diagnose.run import diagnose
from argus.diagnose.verdict import Verdict
from argus.store.open import Store
from argus.store.reader import query_columns


def diagnose_store(
    store: Store,
    job: str,
    run: int,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    threshold: float = THRESHOLD,
    hang_after_s: float = HANG_S,
    keep: bool = True,
    since_ns: int = 0,
) -> Verdict:
    """:func:`argus.diagnose.run.diagnose` on a store, with where the time goes if nothing is wrong or nothing can be
    compared. ``keep``: how the hosts of the job go together is stored."""
    return examine_store(
        store, job, run, steps=steps, threshold=threshold, hang_after_s=hang_after_s, keep=keep, since_ns=since_ns
    ).verdict


@dataclass(frozen=True)
class Examined:
    """A verdict, and what it was reached by.

    Attributes:
        verdict: The verdict.
        across: How the hosts of the job go together; None: it has one, or all have the same clock.
        case: What was compared; None: there were no steps that could be.
    """

    verdict: Verdict
    across: Hosts | None
    case: Case | None


def examine_store(
    store: Store,
    job: str,
    run: int,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    threshold: float = THRESHOLD,
    hang_after_s: float = HANG_S,
    keep: bool = True,
    since_ns: int = 0,
) -> Examined:
    """:func:`diagnose_store`, with what the verdict was reached by: whoever shows more of the job reads it once, and
    shows the same."""
    query = partial(query_columns, store)
    cases: list[Case] = []
    across = prepare(store, query, job, run) if keep else align_hosts(query, job, run)
    verdict = diagnose(
        query, job, run, steps=steps, threshold=threshold, hang_after_s=hang_after_s, across=across,
        stacks=StackReader(store, job, run), since_ns=since_ns, judged=cases.append,
    )  # fmt: skip
    # Where a rank is the cause, or a hang is named, that is what there is to know.
    if verdict["status"] in ("healthy", "inconclusive") or (verdict["ranks"] <= 1 and verdict["status"] == "degraded"):
        hosts = hosts_of(query, {"job": job, "run": run})
        shifts = {rank: across.shift_of(host) for rank, host in hosts.items()} if across is not None else {}
        parts = breakdown(query, {"job": job, "run": run}, sorted(hosts), verdict["steps"], shifts)
        if parts["parts"] and not verdict["reason"].startswith(NOTHING):
            verdict["breakdown"] = parts
    return Examined(verdict, across, cases[-1] if cases else None)
