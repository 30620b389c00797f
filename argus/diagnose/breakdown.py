"""Where the time goes: the breakdown in a verdict when there is nothing to compare.

One rank has no peers, and a recording of three steps has no past. What they did is known all the same: phases, what the
GPUs did, the hottest lines on and off the CPU, kernels, garbage collections; and what is worth trying first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argus.diagnose.read import queries
from argus.diagnose.read.observed import Observed
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.verdict import Breakdown, Item, Part
from argus.model.stacks import Frame
from argus.model.text import printable
from argus.model.units import duration, ranks_text, seconds
from argus.semantics.stacks.stack import label, short_file

RANKS = 16
"""Ranks that are read: of more, so many, evenly chosen."""
MOST = 5
"""Items of a part."""
LEAST = 0.01
"""Share below which an item is left out."""
WORTH = 0.1
"""Share of the time from which on something is worth trying."""
NAME = 60
"""Longest name of a kernel or C++ function that is shown: templates fill screens."""
NO_WAIT_NS = 50_000
"""Kernels that begin so soon after their launch find an empty queue: a launch takes some 5 to 20 µs."""
ADVICE = 2
MOST_OF_IT = 0.5
"""Part of the time of kernels that the stored ones must take to be compared."""

_OWN_STEP = "step BETWEEN"
_SHIFTED_STEP = (
    "toInt64(step) + transform(toUInt32(rank), {shifted:Array(UInt32)}, {shifts:Array(Int64)}, toInt64(0)) BETWEEN"
)


@dataclass
class _Read:
    """What is read of a run.

    Attributes:
        query: Runs SQL with parameters.
        params: job, run, ranks, from_ns, to_ns; first and last where there are steps.
        steps: Steps of all ranks; 0: none.
        span_ns: Time of all ranks together.
        advice: (share of the time, what to try).
        shifted: Whether hosts number steps differently.
        kernels_ns: Time in which GPUs computed or only communicated, of all ranks together; 0: not known.
    """

    query: Query
    params: dict[str, Any]
    steps: int
    span_ns: float
    advice: list[tuple[float, str]]
    shifted: bool
    kernels_ns: float = 0.0

    def rows(self, text: str) -> list[dict[str, Any]]:
        columns = self.query(self.text(text), self.params)
        return [
            dict(zip(columns, row, strict=True))
            for row in zip(*(column.tolist() for column in columns.values()), strict=True)
        ]

    def part(self, name: str, text: str, items: Sequence[Item], query: str) -> Part:
        return Part(part=name, text=text, items=list(items), sql=runnable_sql(self.text(query), self.params))

    def text(self, query: str) -> str:
        """A query by the job's numbers of steps."""
        return query.replace(_OWN_STEP, _SHIFTED_STEP) if self.shifted else query


def short(name: str) -> str:
    """A kernel or C++ function as people know it: without return type, parameters and template arguments."""
    depth = 0
    kept: list[str] = []
    for letter in printable(name).removeprefix("void "):
        depth += letter == "<"
        if not depth and letter == "(" and "".join(kept[-1:]) not in ("", ":"):
            break
        if not depth:
            kept.append(letter)
        depth -= letter == ">" and depth > 0
    text = "".join(kept).strip() or name
    return text if len(text) <= NAME else f"{text[: NAME // 2]}…{text[-NAME // 2 + 1 :]}"


def _percent(items: Sequence[Item]) -> str:
    return ", ".join(f"{item['name']} {item['share']:.0%}" for item in items)


def breakdown(
    query: Query, params: Mapping[str, Any], ranks: Sequence[int], steps: Sequence[int], shifts: Mapping[int, int]
) -> Breakdown:
    """Where the time of some ranks goes.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        ranks: Which.
        steps: The first and the last step; empty: there are none, and all of the trace counts.
        shifts: What to add to the step numbers of ranks, where that is not 0.

    Returns:
        The parts that were measured, and the first two things worth trying. Shares are of the time of the
        ranks or of their GPUs; each part names which.
    """
    chosen = list(ranks)[:: max(1, len(ranks) // RANKS)][:RANKS]
    at = {"job": params["job"], "run": params["run"], "ranks": chosen}
    shifted = {rank: shifts[rank] for rank in chosen if shifts.get(rank)} if steps else {}
    if steps:
        at |= {"first": steps[0], "last": steps[1]}
    if shifted:
        at |= {"shifted": list(shifted), "shifts": list(shifted.values())}
    read = _Read(query, at, 0, 0.0, [], bool(shifted))
    spans = read.rows(queries.BREAKDOWN_SPAN if steps else queries.BREAKDOWN_SAMPLED_SPAN)
    begin, end = min((row["begin_ns"] for row in spans), default=0), max((row["end_ns"] for row in spans), default=0)
    if not steps and not any(row["samples"] for row in spans):
        begin = end = 0
    at |= {"from_ns": begin, "to_ns": end + 1}
    # Clocks of hosts may differ by any time: each rank's own span counts.
    longest = max((row["end_ns"] - row["begin_ns"] for row in spans), default=0) if end > begin else 0
    read.steps = sum(row["steps"] for row in spans) if steps else 0
    read.span_ns = float(
        sum(row["end_ns"] - row["begin_ns"] for row in spans) if steps else longest * max(len(chosen), 1)
    )
    result = Breakdown(ranks=chosen, steps=list(steps), seconds=round(longest / 1e9, 3), parts=[], advice=[])
    if read.steps:
        result["step_ms"] = round(float(np.median([row["step_ns"] for row in spans])) / 1e6, 4)
    if end > begin:
        sections: list[Callable[[_Read], list[Part]]] = [_phases, _gpus, _kernels, _threads, _garbage]
        result["parts"] = [part for section in sections for part in section(read)]
    best = sorted(read.advice, key=lambda one: -one[0])[:ADVICE]
    result["advice"] = [text for _, text in best]
    return result


def _shares(rows: Sequence[Mapping[str, Any]], total: float, most: int = MOST) -> list[Item]:
    items = [
        Item(name=str(row["name"]).replace("_", " "), share=round(row["spent_ns"] / total, 4)) for row in rows if total
    ]
    return [item for item in items if item["share"] >= LEAST][:most]


def _phases(read: _Read) -> list[Part]:
    """The phases of the training thread."""
    if not read.steps:
        return []
    rows = read.rows(queries.BREAKDOWN_PHASES)
    total = sum(row["spent_ns"] for row in rows)
    if not total:
        return []
    items = _shares(rows, total, 8)
    share = {item["name"]: item["share"] for item in items}
    if (loading := share.get("data loading", 0.0)) >= WORTH:
        read.advice.append(
            (
                loading,
                f"Loading data takes {loading:.0%} of a step: more workers (num_workers of the DataLoader), "
                "prefetching, or less work for each sample.",
            )
        )
    if (waits := share.get("communication", 0.0)) >= WORTH:
        read.advice.append(
            (
                waits,
                f"The training thread waits for communication for {waits:.0%} of a step: larger buckets, fewer "
                "synchronisations (no_sync while gradients accumulate), a faster network.",
            )
        )
    if (optimizer := share.get("optimizer", 0.0)) >= 0.25:
        read.advice.append(
            (optimizer / 2, f"The optimiser takes {optimizer:.0%} of a step: fused=True or foreach=True.")
        )
    return [read.part("phases", _percent(items), items, queries.BREAKDOWN_PHASES)]


def _gpus(read: _Read) -> list[Part]:
    """What the GPUs did, and which rank's computes for longer."""
    text = queries.BREAKDOWN_GPU if read.steps else queries.BREAKDOWN_GPU_SECONDS
    rows = read.rows(text)
    if not rows and read.steps:
        text = queries.BREAKDOWN_GPU_SECONDS
        rows = read.rows(text)
    total = sum(row["span_ns"] for row in rows)
    if not total:
        return []
    parts = []
    names = {
        "compute_ns": "computing", "idle_ns": "idle", "exposed_ns": "exposed communication",
        "memcpy_ns": "copies",
    }  # fmt: skip
    sums = [{"name": name, "spent_ns": sum(row[key] for row in rows)} for key, name in names.items()]
    read.kernels_ns = sum(row["compute_ns"] + row["exposed_ns"] for row in rows)
    items = _shares(sorted(sums, key=lambda row: -row["spent_ns"]), total)
    share = {item["name"]: item["share"] for item in items}
    summary = _percent(items)
    communicated = sum(row["communication_ns"] for row in rows)
    if communicated >= LEAST * total:
        hidden = 1 - sum(row["exposed_ns"] for row in rows) / communicated
        summary += f"; of communication {hidden:.0%} is hidden behind computing"
    parts.append(read.part("gpu", summary, items, text))
    _advise_gpu(read, share, rows)
    if text == queries.BREAKDOWN_GPU:
        phases = read.rows(queries.BREAKDOWN_GPU_PHASES)
        spent = sum(row["spent_ns"] for row in phases)
        own = _shares(phases, spent, 8)
        if own:
            parts.append(read.part("gpu_phases", _percent(own), own, queries.BREAKDOWN_GPU_PHASES))
        parts += _between_ranks(read, rows)
    return parts


def _between_ranks(read: _Read, rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Which rank's GPU computes the most, if that is a tenth more than the least."""
    times = sorted((row["compute_ns"] / max(row["steps"], 1), int(row["rank"])) for row in rows)
    if len(times) < 2 or times[-1][0] < (1 + WORTH) * times[0][0]:
        return []
    (least, first), (most, last) = times[0], times[-1]
    text = f"the GPU of rank {last} computes for {duration(most)} a step, that of rank {first} for {duration(least)}"
    items = [Item(name=f"rank {rank}", share=round(ns / most, 4)) for ns, rank in times[::-1][:MOST]]
    read.advice.append(
        (1 - least / most, f"Rank {last} computes {most / max(least, 1):.2f} times as long as rank {first}: has it "
         "more to do (batch, sequence length, layers), or a slower GPU?")
    )  # fmt: skip
    return [read.part("ranks", text, items, queries.BREAKDOWN_GPU)]


def _advise_gpu(read: _Read, share: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
    idle = share.get("idle", 0.0)
    if idle >= WORTH:
        calls = {row["name"]: row for row in read.rows(queries.BREAKDOWN_CALLS)}
        waits = sum(calls[kind]["times"] for kind in ("sync", "memcpy_d2h") if kind in calls)
        latencies = [row["latency_ns"] for row in rows if np.isfinite(row["latency_ns"])]
        late = bool(latencies) and float(np.median(latencies)) < NO_WAIT_NS
        why = f"The GPU is idle for {idle:.0%} of the time"
        if late:
            why += (
                ", and kernels begin as soon as they are launched: the CPU does not keep up. Launch fewer and larger "
            )
            why += "kernels (torch.compile, CUDA graphs, larger batches)."
        else:
            gap = max(row["gap_ns"] for row in rows)
            why += (
                f" (longest gap {duration(gap)}) though launches are ahead of it at other times: see what the "
                "CPU does in "
            )
            why += "the gaps, such as loading data, waiting for results, writing logs."
        if read.steps and waits >= 2 * read.steps:
            why += f" The CPU waits for the GPU {waits / read.steps:.0f} times a step (.item(), .cpu(), synchronize)."
        read.advice.append((idle, why))
    exposed = share.get("exposed communication", 0.0)
    if exposed >= WORTH:
        text = f"Exposed communication takes {exposed:.0%} of the GPU's time: let it overlap with computing "
        text += "(bucket sizes, prefetching of shards), send less or less often, or look at the links."
        read.advice.append((exposed, text))
    copies = share.get("copies", 0.0)
    if copies >= WORTH:
        text = f"Copies take {copies:.0%} of the GPU's time: pinned memory with non_blocking=True, fewer transfers, or "
        text += "keep on the GPU what is copied again and again."
        read.advice.append((copies, text))


def _kernels(read: _Read) -> list[Part]:
    """The kernels that take most."""
    text = queries.BREAKDOWN_SUMMED_KERNELS
    rows = read.rows(text) if read.steps else []
    if not rows:
        text = queries.BREAKDOWN_KERNELS
        rows = read.rows(text)
    total = sum(row["spent_ns"] for row in rows)
    if total < MOST_OF_IT * read.kernels_ns:
        return []  # not all kernels are stored one by one
    by_name: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = by_name.setdefault(short(row["name"]), {"name": short(row["name"]), "spent_ns": 0.0, "times": 0.0})
        one["spent_ns"] += row["spent_ns"]
        one["times"] += row["times"]
    rows = sorted(by_name.values(), key=lambda row: -row["spent_ns"])
    items = [Item(name=row["name"], share=round(row["spent_ns"] / total, 4)) for row in rows[:MOST] if total]
    items = [item for item in items if item["share"] >= LEAST]
    if not items:
        return []
    summary = ", ".join(
        f"{item['name']} {item['share']:.0%} ({row['times']:,.0f} of "
        f"{duration(row['spent_ns'] / max(row['times'], 1))})"
        for item, row in zip(items, rows, strict=False)
    )
    own = next((item for item in items if not item["name"].startswith("nccl")), None)
    if own is not None and own["share"] >= 0.3:
        text_of = f"One kernel, {own['name']}, takes {own['share']:.0%} of the kernels' time: is there a faster one "
        text_of += "(another layout or precision, a fused one)?"
        read.advice.append((own["share"] / 4, text_of))
    return [read.part("kernels", summary, items, text)]


_WAITS = {
    "gil": "the GIL", "futex": "a lock or another thread", "poll": "a file or socket", "sleep": "a sleep of its own",
    "network": "the network", "wait_child": "a child process", "disk": "a disk", "page_fault": "memory to be read back",
    "runqueue": "a free CPU", "driver": "the GPU driver", "read": "a read", "write": "a write",
}  # fmt: skip


def _line(row: Mapping[str, Any]) -> str:
    if not row["function"]:
        return "no stack"
    if row["frame"] == "python":
        return label(Frame("python", row["function"], row["file"], int(row["line"])), lines=True)
    name = short(row["function"])
    module = short_file(row["file"]).rpartition("/")[2]
    return f"{name} ({module})" if module and not name.startswith(module) else name


def _threads(read: _Read) -> list[Part]:
    """What the main thread does, and the lines that take most: of all threads on the CPU, of the main one off it."""
    rows = read.rows(queries.BREAKDOWN_LINES)
    on = [row for row in rows if row["kind"] == "cpu"]
    off = [row for row in rows if row["kind"] == "off" and row["main"]]
    main_ns, running_ns = sum(row["spent_ns"] for row in on if row["main"]), sum(row["spent_ns"] for row in on)
    queued_ns = sum(row["spent_ns"] for row in off if row["reason"] == "runqueue")
    waited_ns = sum(row["spent_ns"] for row in off) - queued_ns
    total_ns = max(main_ns + queued_ns + waited_ns, 1.0)
    if main_ns + queued_ns + waited_ns <= 0:
        return []
    parts = []
    if not Observed(read.query, read.params).stayed("off_cpu", int(read.params["to_ns"])):
        text = "not known: time off the CPU was not followed all of the time, since that cost too much"
        hottest = _top(on, running_ns)
        parts.append(read.part("main_thread", text, [], queries.BREAKDOWN_LINES))
        return parts + (
            [read.part("lines_on_cpu", _percent(hottest), hottest, queries.BREAKDOWN_LINES)] if hottest else []
        )
    doing = [("computing", main_ns), ("waiting", waited_ns), ("ready, but no CPU free", queued_ns)]
    items = [Item(name=name, share=round(ns / total_ns, 4)) for name, ns in doing]
    items = [item for item in sorted(items, key=lambda one: -one["share"]) if item["share"] >= LEAST]
    parts.append(read.part("main_thread", _percent(items), items, queries.BREAKDOWN_LINES))
    if queued_ns >= WORTH * total_ns:
        text = f"The main thread is ready for {queued_ns / total_ns:.0%} of the time, and no CPU is free: "
        read.advice.append(
            (
                queued_ns / total_ns,
                text + "see what else runs on its CPUs (top -H), its affinity and its control group.",
            )
        )
    hottest = _top(on, running_ns)
    if hottest:
        parts.append(read.part("lines_on_cpu", _percent(hottest), hottest, queries.BREAKDOWN_LINES))
        first, share = hottest[0], running_ns and hottest[0]["share"] * main_ns / total_ns
        if first["name"] != "no stack" and first["share"] >= WORTH and share >= WORTH:
            text = (
                f"{first['share']:.0%} of the time on the CPU goes to {first['name']}: argus export svg -o flame.svg "
            )
            read.advice.append((share / 2, text + "shows who calls it."))
    waits = [row for row in off if row["reason"] != "runqueue"]
    named_waits: dict[str, float] = {}
    for row in waits:
        what = _WAITS.get(row["reason"], row["reason"] or "something")
        key = f"{_line(row)}, for {what}"
        named_waits[key] = named_waits.get(key, 0.0) + row["spent_ns"]
    longest = [Item(name=name, share=round(ns / total_ns, 4)) for name, ns in named_waits.items()]
    longest = sorted((item for item in longest if item["share"] >= LEAST), key=lambda one: -one["share"])[:MOST]
    if longest:
        parts.append(read.part("lines_off_cpu", _percent(longest), longest, queries.BREAKDOWN_LINES))
        if longest[0]["share"] >= 0.2:
            text = f"The main thread waits for {longest[0]['share']:.0%} of the time in {longest[0]['name']}."
            read.advice.append((longest[0]["share"] * 0.75, text))
    return parts


def _top(rows: Sequence[Mapping[str, Any]], total: float) -> list[Item]:
    """The lines that take most of a time."""
    spent: dict[str, float] = {}
    for row in rows:
        spent[_line(row)] = spent.get(_line(row), 0.0) + row["spent_ns"]
    items = [Item(name=name, share=round(ns / total, 4)) for name, ns in spent.items() if total]
    return sorted((item for item in items if item["share"] >= LEAST), key=lambda one: -one["share"])[:MOST]


def _garbage(read: _Read) -> list[Part]:
    """Garbage collections that were long enough to be seen."""
    (row,) = read.rows(queries.PAUSES) or [{}]
    total = float(row.get("total_ns") or 0.0)
    if not total or total < LEAST * read.span_ns:
        return []
    share = round(min(total / read.span_ns, 1.0), 4)
    text = f"{int(row['pauses'])} pauses of {duration(float(row['usual_ns']))}, {share:.0%} of the time"
    if row["function"]:
        text += f", most in {label(Frame('python', row['function'], row['file'], int(row['line'])), lines=True)}"
    read.advice.append(
        (share, f"Collecting garbage takes {share:.0%} of the time: gc.freeze() after the setup, or gc.disable() and "
         "gc.collect() every so many steps.")
    )  # fmt: skip
    return [read.part("garbage", text, [Item(name="collecting garbage", share=share)], queries.PAUSES)]


def heading(of: Breakdown) -> str:
    """What the times are of, in words."""
    who = ranks_text(of["ranks"]) if len(of["ranks"]) <= RANKS else f"{len(of['ranks'])} ranks"
    if not of["steps"]:
        return f"{who}, {seconds(of['seconds'])}"
    first, last = of["steps"]
    what = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{who}, {what}" + (f", {duration(of['step_ms'] * 1e6)} a step" if "step_ms" in of else "")
