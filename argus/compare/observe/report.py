"""report.md: what the records of an observation say, for people. Nothing is measured for it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any

from argus.compare.observe.evaluate import failure_text
from argus.compare.observe.plan import Plan, to_document
from argus.compare.observe.rule import FAMILY, NAMES
from argus.model.text import counted, printable
from argus.model.units import binary_size, duration

RUNS_SHOWN = 60
"""Rows of the table of runs; of more, those that failed or stand out, and the first."""


def report_of(metrics: Mapping[str, Any], meta: Mapping[str, Any], plan: Plan) -> str:
    """The page as Markdown."""
    parts = [
        _head(metrics, meta, plan), _signs(metrics), _summary(metrics), _time(metrics), _differences(metrics),
        _noise(metrics), _runs(metrics), _traces(metrics), _machine(meta), _how(metrics, plan),
    ]  # fmt: skip
    return "\n".join(line for part in parts for line in part) + "\n"


def cell(value: object) -> str:
    """A text for a cell of a table, or a line: no markup of somebody else's."""
    text = printable(str(value))
    for character in "\\`|<>[]*":
        text = text.replace(character, f"\\{character}")
    return text


def shown(figure: str, value: float | None) -> str:
    """A figure with its unit, which its name ends in; - where it is unknown."""
    if value is None:
        return "-"
    if figure.endswith("_ns"):
        return duration(value)
    if figure.endswith("_bytes"):
        return binary_size(round(value))
    if figure.endswith("_share"):
        return f"{value:.1%}"
    unit = "/s" if figure.endswith("_s") else ""
    return f"{value:,.0f}{unit}" if abs(value) >= 1000 else f"{value:.4g}{unit}"


def named_figure(figure: str) -> str:
    """A figure's name as a sentence has it: ``latency p50``, ``time per request``, ``wall time``."""
    words = figure.removesuffix("_ns").removesuffix("_s").replace("_", " ")
    return {"wall": "wall time", "step": "step time"}.get(words, words)


def _head(metrics: Mapping[str, Any], meta: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    decision = metrics["decision"]
    done = sum(run["status"] != "interrupted" for run in metrics["runs"])
    cut = ", and one was cut short" if done < len(metrics["runs"]) else ""
    made = f"{done:,} of {counted(meta['runs'], 'run')} {'was' if meta['runs'] == 1 else 'were'} made{cut}"
    yield "# Does it behave the same when it is repeated?"
    yield ""
    if decision is None:
        yield f"**{meta['status']}**: {made}; nothing is decided."
        yield "`argus observe report` on this folder judges the runs that there are."
    else:
        yield f"**{decision['status'].upper()}**: {cell(decision['reason'])}."
        if meta["status"] != "finished":
            yield ""
            yield f"The observation was {meta['status']}: {made}."
    yield ""
    if metrics["partial_failure"]:
        title, text = failure_text(metrics["runs"])
        yield f"**{title.capitalize()}**: {text}."
        yield ""
    document = to_document(plan)
    yield f"* command: `{printable(shlex.join(document['command'])).replace('`', chr(39))}`"
    arms = f" of each of {len(plan.arms)} arms" if len(plan.arms) > 1 else ""
    yield f"* runs: {plan.repeat}{arms}, after {plan.warmup} for warm-up, in random blocks of seed {plan.seed}"
    begun = datetime.fromtimestamp(float(meta["started_s"]), timezone.utc)
    yield f"* begun: {begun:%Y-%m-%d %H:%M:%S} UTC"
    yield ""


def _signs(metrics: Mapping[str, Any]) -> Iterator[str]:
    decision = metrics["decision"]
    if not decision or not decision["signs"]:
        return
    yield "## What was found"
    yield ""
    yield "| kind | figure | what | chance if runs are alike | runs |"
    yield "|---|---|---|---|---|"
    for sign in decision["signs"]:
        chance = f"{sign['p']:.2g}" if sign["p"] else "none"
        runs = _numbers(sign["runs"])
        yield f"| {sign['kind']} | {cell(sign['figure'])} | {cell(sign['text'])} | {chance} | {runs} |"
    yield ""
    if decision["disturbance"]:
        one = decision["disturbance"]
        name = NAMES.get(one["name"], one["name"])
        yield f"{one['share']:.0%} of the variance correlates with {name}. Without it, none of the above remains."
        yield ""


def _numbers(runs: Sequence[int]) -> str:
    if not runs:
        return "all"
    more = f" and {len(runs) - 12} more" if len(runs) > 12 else ""
    return ", ".join(map(str, runs[:12])) + more


def _summary(metrics: Mapping[str, Any]) -> Iterator[str]:
    if not metrics["summary"]:
        return
    arms = len({row["arm"] for row in metrics["summary"]}) > 1
    yield "## Figures"
    yield ""
    yield f"{'| arm ' if arms else ''}| figure | runs | mean | deviation | least | most | variation |"
    yield f"{'|---' if arms else ''}|---|--:|--:|--:|--:|--:|--:|"
    for row in metrics["summary"]:
        name = row["figure"]
        values = " | ".join(shown(name, row[one]) for one in ("mean", "std", "min", "max"))
        variation = "-" if row["cv"] is None else f"{row['cv']:.1%}"
        first = f"| {cell(row['arm'])} " if arms else ""
        yield f"{first}| {cell(name)} | {row['runs']} | {values} | {variation} |"
    yield ""
    yield "Warm-up runs and runs that failed are left out. A figure that is missing here was not measured: it is not 0."
    yield ""


WAITS = ("on a CPU", "waiting for a CPU", "waiting for disks", "waiting for something else")
"""Where the time of a run goes. The last is what is left of it: locks, timers, the network, other processes, stops."""
MOSTLY = 0.5
"""A share of the time that a sentence mentions."""


def time_of(figures: Mapping[str, float | None]) -> list[float] | None:
    """What a run's time is made of, in shares of its wall time, as :data:`WAITS` has them. Threads count one by one, so
    the first three may add up to more than 1, and the last is 0 then. None: its wall or CPU time is unknown."""
    wall, user, system = (figures.get(name) for name in ("wall_ns", "user_ns", "system_ns"))
    if not wall or user is None or system is None:
        return None
    known = [user + system, figures.get("run_queue_ns") or 0.0, figures.get("block_io_ns") or 0.0]
    return [one / wall for one in [*known, max(0.0, wall - sum(known))]]


def _time(metrics: Mapping[str, Any]) -> Iterator[str]:
    """What the command did with its time, and what it waited for: a median of runs."""
    runs = [run for run in metrics["runs"] if not run["warmup"] and run["status"] == "ok"]
    of_run = {run["number"]: shares for run in runs if (shares := time_of(run["figures"])) is not None}
    if not of_run:
        return
    named = {number for sign in (metrics["decision"] or {"signs": []})["signs"] for number in sign["runs"]}
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    chosen: list[tuple[str, list[int]]] = [
        (cell(arm), [run["number"] for run in runs if run["arm"] == arm]) for arm in arms if len(arms) > 1
    ] or [("all runs", list(of_run))]
    if named & of_run.keys() and of_run.keys() - named:
        chosen += [
            ("runs that stand out", sorted(named & of_run.keys())),
            ("the others", sorted(of_run.keys() - named)),
        ]
    wall = {run["number"]: run["figures"]["wall_ns"] for run in runs if run["number"] in of_run}
    unknown = [
        waited
        for waited, name in zip(WAITS[1:3], ("run_queue_ns", "block_io_ns"), strict=True)
        if all(run["figures"].get(name) is None for run in runs)
    ]
    yield "## Where the time of a run goes"
    yield ""
    yield f"| | wall | {' | '.join(WAITS)} |"
    yield "|---|--:|--:|--:|--:|--:|"
    most: list[str] = []
    for title, numbers in chosen:
        known = [number for number in numbers if number in of_run]
        if not known:
            continue
        shares = [median(of_run[number][place] for number in known) for place in range(len(WAITS))]
        cells = ["-" if waited in unknown else f"{share:.0%}" for waited, share in zip(WAITS, shares, strict=True)]
        yield f"| {title} | {shown('wall_ns', median(wall[number] for number in known))} | {' | '.join(cells)} |"
        most += [f"{title}: {share:.0%} {waited}" for waited, share in zip(WAITS[1:], shares[1:], strict=True)
                 if share >= MOSTLY]  # fmt: skip
    yield ""
    if most:
        yield f"It is not computing that takes the time ({'; '.join(most)}): a CPU profile would show little of it."
        yield ""
    yield "Something else is a lock, a timer, the network, another process, or a stop. Threads count one by one."
    if unknown:
        yield f"Not known here, and part of the last column: {', '.join(unknown)}."
    yield ""


def _differences(metrics: Mapping[str, Any]) -> Iterator[str]:
    decision = metrics["decision"]
    if not decision or not decision["differences"]:
        return
    yield "## What differed in the runs that stand out"
    yield ""
    yield "| | in these runs | in the others |"
    yield "|---|--:|--:|"
    for one in decision["differences"]:
        yield f"| {one['name']} | {shown(one['name'], one['in_these_runs'])} | {shown(one['name'], one['in_others'])} |"
    yield ""
    yield "Medians that lie outside of everything that the others had."
    yield ""


def _noise(metrics: Mapping[str, Any]) -> Iterator[str]:
    runs = [run for run in metrics["runs"] if run["noise"]]
    names = list(dict.fromkeys(name for run in runs for name in run["noise"]))
    rows = []
    for name in names:
        values = sorted(run["noise"][name] for run in runs if run["noise"].get(name) is not None)
        if values:
            rows.append((name, values[0], values[len(values) // 2], values[-1]))
    if not rows:
        return
    yield "## What the machine did besides"
    yield ""
    yield "| | least | median | most |"
    yield "|---|--:|--:|--:|"
    for name, *three in rows:
        yield f"| {name} | {' | '.join(shown(name, value) for value in three)} |"
    if unknown := [name for name in names if name not in [row[0] for row in rows]]:
        yield ""
        yield f"Not known here: {', '.join(unknown)}."
    yield ""


def _runs(metrics: Mapping[str, Any]) -> Iterator[str]:
    runs = metrics["runs"]
    if not runs:
        return
    named = {number for sign in (metrics["decision"] or {"signs": []})["signs"] for number in sign["runs"]}
    odd = [run for run in runs if run["status"] != "ok" or run["number"] in named]
    chosen = runs if len(runs) <= RUNS_SHOWN else odd or runs
    yield "## Runs"
    yield ""
    yield "| run | arm | ended | wall | CPU | others' CPU | |"
    yield "|--:|---|---|--:|--:|--:|---|"
    for run in chosen[:RUNS_SHOWN]:
        figures = run["figures"]
        cpu = None if figures.get("user_ns") is None else figures["user_ns"] + (figures.get("system_ns") or 0.0)
        marks = ["warm-up"] * run["warmup"] + ["stands out"] * (run["number"] in named)
        yield (
            f"| {run['number']} | {cell(run['arm'])} | {_ended(run)} | {shown('wall_ns', figures.get('wall_ns'))} "
            f"| {shown('cpu_ns', cpu)} | {shown('_share', run['noise'].get('others_cpu_share'))} | {', '.join(marks)} |"
        )
    if len(runs) > len(chosen[:RUNS_SHOWN]):
        yield ""
        yield f"{len(runs) - len(chosen[:RUNS_SHOWN]):,} more are in metrics.json."
    yield ""


def _traces(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Where the traces are, and what to ask of them."""
    traced = [run for run in metrics["runs"] if (run.get("trace") or {}).get("state") == "on"]
    if not traced:
        return
    named = {number for sign in (metrics["decision"] or {"signs": []})["signs"] for number in sign["runs"]}
    jobs: dict[str, list[Mapping[str, Any]]] = {}
    for run in traced:
        jobs.setdefault(run["trace"]["job"], []).append(run)
    yield "## Traces"
    yield ""
    yield "| job | runs: number of the trace |"
    yield "|---|---|"
    for job, runs in jobs.items():
        shown_runs = ", ".join(f"{run['number']}: {run['trace']['run']}" for run in runs[:RUNS_SHOWN])
        yield f"| {cell(job)} | {shown_runs}{', …' if len(runs) > RUNS_SHOWN else ''} |"
    yield ""
    last = traced[-1]["trace"]
    yield "```"
    yield f"argus diagnose --job {_word(last['job'])} --run {last['run']}"
    for first, second in _pairs(jobs, named):
        yield f"argus compare {second} --against {first}"
    yield "```"
    yield ""
    used = sorted(run["trace"]["argus_cpu_ns"] for run in traced)
    yield (
        f"Argus itself used {duration(used[len(used) // 2])} of CPU time in a run (median), with its start and the "
        "storing of rows. Figures are of the command alone, and include what probes cost it."
    )
    yield ""


def _pairs(jobs: Mapping[str, Sequence[Mapping[str, Any]]], named: Collection[int]) -> Iterator[tuple[str, str]]:
    """What to compare with what: runs that stand out with the others of their job, and arms with the first one."""

    def words(job: str, runs: Sequence[Mapping[str, Any]]) -> str:
        return _word(f"{job}@{','.join(str(run['trace']['run']) for run in runs[:8])}")

    for job, runs in jobs.items():
        odd = [run for run in runs if run["number"] in named]
        others = [run for run in runs if run["number"] not in named]
        if odd and others:
            yield words(job, others), words(job, odd)
    first, *rest = jobs
    for job in rest:
        yield words(first, jobs[first]), words(job, jobs[job])


def _word(text: str) -> str:
    return shlex.quote(printable(text)).replace("`", "'")


def _ended(run: Mapping[str, Any]) -> str:
    if run["status"] == "failed":
        return f"signal {run['signal']}" if run["signal"] is not None else f"exit code {run['exit_code']}"
    return cell(run["status"].replace("_", " ") + (f": {run['error']}" if run["error"] else ""))


def _machine(meta: Mapping[str, Any]) -> Iterator[str]:
    facts = meta.get("facts") or {}
    if facts:
        yield "## The machine"
        yield ""
        for name, value in facts.items():
            yield f"* {cell(name)}: {cell(value)}"
        yield ""


def _how(metrics: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    decision = metrics["decision"]
    if decision is None:
        return
    yield "## How it was decided"
    yield ""
    tests = counted(decision["tests"], "test")
    yield (
        f"{tests}, each with a chance of {decision['level']:.2%} to find something in runs that are "
        f"alike: {FAMILY:.0%} together. The margin is {plan.margin:.1%}."
    )
    if decision["spread"] is not None:
        upper = "-" if decision["spread_upper"] is None else f"{decision['spread_upper']:.1%}"
        yield f"Runs vary by {decision['spread']:.1%} (coefficient of variation within arms), at most {upper} (95 %)."
    if decision["runs"]:
        yield (
            f"Something that happened in none of {counted(decision['runs'], 'run')} may still happen in up to "
            f"{decision['undetected']:.0%} of them (95 %)."
        )
    for note in decision["notes"]:
        yield f"Note: {cell(note)}"
