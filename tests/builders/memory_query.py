"""The queries of a diagnosis answered in numpy from a synthetic job: fast enough for hundreds of jobs, and a second
opinion on the SQL (tests compare the two)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.queries import ON_CPUS
from tests.builders.stored_job import analyse
from tests.builders.synthetic_job import H2D, MODULE, SYNC, Job

_GPU_TIMES = (
    *(
        f"{part}_ns"
        for part in (
            "forward",
            "backward",
            "optimizer",
            "compute",
            "collective",
            "pipeline",
            "transfer",
            "idle",
            "step",
        )
    ),
    "kernels",
)


class MemoryQuery:
    """Callable like ``query_columns`` with the store bound."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.groups, self.steps, self.tracker = analyse(job)

    # Over 100 lines: one branch a query, each of which says what the job answers.
    def __call__(self, text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        steps = self.steps
        if "first" in params:
            steps = steps[(steps["step"] >= params["first"]) & (steps["step"] <= params["last"])]
        empty = np.empty(0, np.int64)
        if text == queries.SPAN:
            return {
                "first": np.array([steps["step"].min(initial=2**31)]),
                "last": np.array([steps["step"].max(initial=0)]),
                "n": np.array([len(steps)]),
            }
        if text == queries.LAST_LOOK:
            # A synthetic job is like an imported one: nobody looked at it, so it cannot be seen to hang.
            return {name: np.array([0]) for name in ("looked_ns", "stepped_ns", "called_ns", "now_ns")}
        if text == queries.RANK_USERS:
            return {"uid": empty, "hosts": empty}
        if text == queries.NODE_HEALTH:
            return dict.fromkeys(("host", "check", "status", "text", "ts_ns"), empty)
        if text == queries.GROUPS:
            return dict.fromkeys(("host", "comm_group", "dimension", "ranks"), empty)
        if text == queries.GPU_TIMES:
            return {"rank": empty, "step": empty, **dict.fromkeys(_GPU_TIMES, empty)}
        if text == queries.TRANSFERS:
            return dict.fromkeys(("comm_group", "op", "one", "other", "step", "took_ns", "calls", "bytes"), empty)
        if text == queries.TRANSFER_RANKS:
            return dict.fromkeys(("comm_group", "op", "one", "other", "ranks"), empty)
        if text == queries.ISSUE:
            return dict.fromkeys(("rank", "step", "p50_ns", "p99_ns", "void_share"), empty)
        if text == queries.PATTERNS:
            return dict.fromkeys(("kind", "function", "rank", "beta", "mu", "sigma"), empty)
        if text == queries.SPAN_NS:
            return {"end_ns": empty}  # nothing is known of threads
        if text == queries.LOADING:
            return {"rank": empty, "loading_ns": empty}
        if text == queries.OPERATIONS:
            return {"step": empty}
        if text == queries.ONLY_STEPS:
            return {"calls": np.array([1]), "found": np.array([len(steps)])}
        if text == queries.STATES:
            return {"rank": empty, "state": empty, "host": empty}
        if text == ON_CPUS:
            return {"alone": np.array([0])}
        if text == queries.ANY_BASELINE:
            return {"n": np.array([0])}
        if text == queries.RUN_OWNER:
            return {"owner": np.array([[]], object)}
        if text == queries.SESSIONS:
            return {"open": np.array([0]), "world_size": np.array([0])}
        if text == queries.COVERAGE:
            return {"counter": empty, "value": empty}
        if text == queries.HOSTS:
            ranks = np.arange(len(self.job.ranks))
            return {"rank": ranks, "host": np.array([f"node-{r // 8}" for r in ranks])}
        if text == queries.ALIGNMENT:
            ok = self.groups["error"] == ""
            error = self.groups["error"][~ok]
            return {
                "aligned_ranks": np.array([len(np.unique(self.groups["rank"][ok]))]),
                "ranks": np.array([len(np.unique(self.groups["rank"]))]),
                "why": error[:1] if len(error) else np.array([""]),
            }
        if text == queries.STEPS:
            numbers = np.unique(steps["step"])
            rows = [steps[steps["step"] == n] for n in numbers]
            return {
                "step": numbers,
                "duration_ns": np.array([np.median(r["duration_ns"]) for r in rows]),
                "calls": np.array([np.mean(r["collectives"]) for r in rows]),
                "confidence": np.array([np.median(r["confidence"]) for r in rows]),
                "ranks": np.array([len(r) for r in rows]),
            }
        if text == queries.WORK:
            return self._work(steps, params["ranks"])
        if text == queries.SLOWER:
            ranks = np.unique(steps["rank"])
            before = [
                np.median(steps["duration_ns"][(steps["rank"] == r) & (steps["step"] < params["onset"])]) for r in ranks
            ]
            after = [
                np.median(steps["duration_ns"][(steps["rank"] == r) & (steps["step"] >= params["onset"])])
                for r in ranks
            ]
            return {"rank": ranks, "before_ns": np.array(before), "after_ns": np.array(after)}
        if text == queries.CPU_TIME:
            return self._cpu_time(steps, params["ranks"])
        if text in (queries.PHASE_TIME, queries.GPU_PHASE_TIME):
            return {name: np.empty(0) for name in ("rank", "step", "phase", "duration_ns")}
        if text == queries.KERNEL_TIME:
            return {name: np.empty(0) for name in ("kernel_id", "kernel", "rank", "launches", "spent_ns", "steps")}
        late = self._late(steps)
        if text == queries.LATENESS:
            return late
        by_step: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(lambda: -np.inf))
        for rank, step, peak in zip(
            late["rank"].tolist(), late["step"].tolist(), late["peak_ns"].tolist(), strict=True
        ):
            by_step[step][rank] = max(by_step[step][rank], peak)
        numbers = sorted(by_step)
        if text == queries.LEAD:
            wanted, members = set(params["ranks"]), set(params["members"])
            by_step = {n: {r: v for r, v in late.items() if r in members} for n, late in by_step.items()}
            numbers = [n for n in numbers if wanted & set(by_step[n]) and set(by_step[n]) - wanted]
            return {
                "step": np.array(numbers),
                "suspects_ns": np.array([max(v for r, v in by_step[n].items() if r in wanted) for n in numbers]),
                "others_ns": np.array([max(v for r, v in by_step[n].items() if r not in wanted) for n in numbers]),
            }
        assert text == queries.LAST
        top = [sorted(by_step[n].items(), key=lambda item: -item[1])[:2] for n in numbers]
        return {
            "step": np.array(numbers),
            "rank": np.array([t[0][0] for t in top]),
            "lead_ns": np.array([t[0][1] - t[1][1] for t in top]),
        }

    def _work(self, steps: NDArray[np.void], ranks: list[int]) -> dict[str, NDArray[Any]]:
        rows = defaultdict(list)
        for row in steps[np.isin(steps["rank"], ranks)]:
            calls = self.job.ranks[row["rank"]].collectives
            ts = calls["ts_ns"].astype(np.int64)
            inside = (ts > int(row["ts_ns"])) & (ts <= int(row["ts_ns"] + row["duration_ns"]))
            rows[int(row["step"])].append((row["launches"], inside.sum(), 4 * calls["count"][inside].sum()))
        values = np.array([np.mean(rows[step], axis=0) for step in sorted(rows)], np.float64).reshape(-1, 3)
        return {"step": np.array(sorted(rows)), **dict(zip(("launches", "calls", "bytes"), values.T, strict=True))}

    def _late(self, steps: NDArray[np.void]) -> dict[str, NDArray[Any]]:
        out: dict[str, list[NDArray[Any]]] = defaultdict(list)
        known = self.groups[self.groups["error"] == ""]
        for group in np.unique(known["comm_group"]):
            parts = []
            for row in known[known["comm_group"] == group]:
                calls = self.job.ranks[row["rank"]].collectives
                calls = calls[calls["comm"] == row["comm"]]
                parts.append(
                    (
                        int(row["rank"]),
                        calls["seq"].astype(np.int64) + row["seq_offset"],
                        calls["ts_ns"].astype(np.int64),
                    )
                )
            if len(parts) < 2:
                continue
            low, high = min(p[1][0] for p in parts), max(p[1][-1] for p in parts)
            times = np.full((len(parts), high - low + 1), -1, np.int64)
            for i, (_, seq, ts) in enumerate(parts):
                times[i, seq - low] = ts
            seen = times >= 0
            count = seen.sum(axis=0)
            use = np.flatnonzero((count > 1) & (10 * count >= 9 * count.max()))
            order = np.sort(np.where(seen, times, np.iinfo(np.int64).max)[:, use], axis=0)
            median = order[(count[use] - 1) // 2, np.arange(len(use))]
            late = np.where(seen[:, use], times[:, use] - median, np.iinfo(np.int64).min).astype(np.float64)
            late[~seen[:, use]] = np.nan
            reference = np.argmax(seen[:, use], axis=0)
            number = np.full(len(use), -1)
            for i, (rank, _, _) in enumerate(parts):
                own = steps[steps["rank"] == rank]
                selected = reference == i
                ts = times[i, use[selected]]
                ends = (own["ts_ns"] + own["duration_ns"]).astype(np.int64)
                place = np.searchsorted(ends, ts)
                ok = place < len(own)
                ok[ok] &= ts[ok] > own["ts_ns"][place[ok]].astype(np.int64)
                found = np.full(len(ts), -1)
                found[ok] = own["step"][place[ok]]
                number[selected] = found
            for step in np.unique(number[number >= 0]).tolist():
                values = late[:, number == step]
                rows = np.flatnonzero(~np.isnan(values).all(axis=1))
                values = values[rows]
                out["comm_group"].append(np.full(len(rows), group))
                out["rank"].append(np.array([parts[i][0] for i in rows]))
                out["step"].append(np.full(len(rows), step))
                out["peak_ns"].append(np.nanmax(values, axis=1))
                out["first_ns"].append(np.array([v[~np.isnan(v)][0] for v in values]))
                out["last_ns"].append(np.array([v[~np.isnan(v)][-1] for v in values]))
        names = ("comm_group", "rank", "step", "peak_ns", "first_ns", "last_ns")
        return {n: np.concatenate(out[n]) if out[n] else np.empty(0, np.int64) for n in names}

    def _cpu_time(self, steps: NDArray[np.void], ranks: list[int]) -> dict[str, NDArray[Any]]:
        rows = []
        for rank in ranks:
            calls = self.job.ranks[rank].cuda
            ts, inside = calls["ts_ns"].astype(np.int64), np.maximum(calls["duration_ns"], 0)
            for row in steps[steps["rank"] == rank]:
                begin, end = int(row["ts_ns"]), int(row["ts_ns"] + row["duration_ns"])
                own = slice(np.searchsorted(ts, begin, side="right"), np.searchsorted(ts, end, side="right"))
                before = np.maximum.accumulate(np.concatenate([[begin], (ts + inside)[own]]))[:-1]
                gaps = np.maximum(ts[own] - before, 0)
                call, spent = calls["call"][own], inside[own]
                if len(call):
                    rows.append(
                        (
                            rank,
                            row["step"],
                            spent[call == SYNC].sum(),
                            spent[call == MODULE].sum(),
                            gaps[call == H2D].sum(),
                            gaps[call != H2D].sum(),
                        )
                    )
        table = np.array(rows, np.float64).reshape(-1, 6)
        return dict(zip(("rank", "step", "sync_ns", "module_ns", "data_ns", "other_ns"), table.T, strict=True))
