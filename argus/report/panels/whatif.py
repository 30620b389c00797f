"""What if: how much longer a step takes for each rank, stage and kind of operation."""

from __future__ import annotations

import numpy as np

from argus.diagnose.read import queries
from argus.report.arrays import Arrays
from argus.report.look import Look, absent, bounded, panel
from argus.report.panel import Bar, Bars, Column, Panel, Sql, Table

ID = "whatif"
TITLE = "What if"

SHOWN = 12
"""Bars of each kind."""
KINDS = (
    ("S_stage", "stage", "if all other stages were ideal, a step would take so many times the ideal one"),
    ("S_rank", "rank", "if all other ranks were ideal, a step would take so many times the ideal one"),
    ("S_dp_rank", "data-parallel rank", "if all other data-parallel ranks were ideal"),
    ("S_optype", "", "if all other kinds of operations were ideal"),
)
WORTH = 1.02
"""Of less it is not asked who explains it."""
LEAST = 1.001
"""Less is nothing."""
SPAN = 0.1
"""Of a step, that the longest possible bar stands for at least: in a job without anything slow all bars are noise."""


def build(look: Look, arrays: Arrays) -> Panel:
    """The bars of the verdict's what-if."""
    answers = look.verdict.get("whatif")
    if answers is None:
        why = (
            "its step cannot be rebuilt: that takes GPU times of all ranks and transfers (arm the job: argus run …), "
            "or an import of its operations (argus import whatif)"
        )
        return absent(ID, TITLE, why)
    named = set(look.named)
    bars: list[Bar] = [
        {"title": "the whole job", "value": float(answers["S"]), "detail": "a step over the ideal one", "named": False}
    ]
    listed: list[list[str | float | int | None]] = [["the whole job", float(answers["S"])]]
    for key, kind, detail in KINDS:
        values = [(str(name), float(value)) for name, value in dict(answers.get(key, {})).items()]
        for name, value in [one for one in values if one[1] >= LEAST][:SHOWN]:
            title = bounded(f"{kind} {name}".strip(), 60)
            bars.append({
                "title": title, "value": value, "detail": detail,
                "named": key == "S_rank" and name.isdigit() and int(name) in named,
            })  # fmt: skip
            listed.append([title, value])
    columns: list[Column] = [{"title": "of", "unit": ""}, {"title": "a step over the ideal one", "unit": "ratio"}]
    table: Table = {"columns": columns, "rows": listed[:50], "of": len(listed)}
    view: Bars = {"view": "bars", "unit": "ratio", "origin": 1.0, "least": SPAN, "bars": bars}
    lead = f"A step takes {float(answers['S']):.2f} times what it would if all with the same work took equally long. "
    if float(answers["S"]) >= WORTH:
        workers, stage = (float(np.clip(answers[key], 0.0, 1.0)) for key in ("M_W", "M_S"))
        lead += f"The slowest ranks explain {workers:.0%} of that, the last stage {stage:.0%}. "
    if look.cost_ns is not None:
        # Of operations that were recorded the verdict's slowdown is this one.
        lead += (
            f"This is not the {look.slowdown_text}, which compares with the peers alone: here ideal is the mean of all "
            "with the same work, the slow ones among them, and delays between operations are left out. "
        )
    lead += "Each bar leaves one of them as it is, and makes all others ideal."
    return panel(ID, TITLE, lead, [view], table=table, sql=_sql(look))


def _sql(look: Look) -> list[Sql]:
    if look.recorded_stages:
        window = {"first": max(look.steps[0], look.steps[1] - 4), "last": look.steps[1]}
        return [look.sql("Operations of the last steps, from which the step is rebuilt", queries.OPERATIONS, **window)]
    case = look.case
    found: list[Sql] = []
    if case is not None and case.gpus is not None:
        window = {name: case.gpus.window[name] for name in ("first", "last")}
        found.append(look.sql("What the GPUs did, from which the step is rebuilt", queries.GPU_TIMES, **window))
        if case.transfers is not None:
            window = {name: case.transfers.window[name] for name in ("first", "last")}
            found.append(look.sql("What transfers took", queries.TRANSFERS, **window))
    return found
