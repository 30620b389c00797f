"""The verdict: what ``argus diagnose --format json`` prints. The contract is ``verdict.schema.json`` beside this
file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypedDict

SCHEMA = "argus.verdict/1"

Status = Literal["healthy", "degraded", "hung", "inconclusive"]

FINDING_KINDS = (
    "compute_straggler",
    "masked_compute_straggler",
    "link_degradation",
    "pipeline_bubble",
    "stage_imbalance",
    "sequence_imbalance",
    "jit_stall",
    "kernel_issue_stall",
    "data_loading",
    "gc_pause",
    "host_contention",
    "regression",
    "jitter",
    "hang",
)
"""Every kind of finding the contract knows."""

LEVELS = ("iteration", "phase", "kernel", "stack")


class Evidence(TypedDict):
    """One thing that was compared: the sentence with its numbers, and the query that shows it again."""

    text: str
    sql: str


class Collective(TypedDict):
    """The collective in which ranks wait for others: number ``seq`` of the communicator ``comm_group`` (as text: it has
    64 bits), whom it ``came`` to and who is ``missing``; ``dimension`` is what the communicator is for, if known."""

    op: str
    comm_group: str
    seq: int
    came: list[int]
    missing: list[int]
    dimension: str


class _Hung(TypedDict, total=False):
    collective: Collective


class Finding(_Hung):
    """One cause of lost time. ``slowdown`` is actual ÷ what the step would take without it; ``share`` its part of the
    lost time, 0 to 1; ``confidence`` is explained where it is computed. ``id`` stays the same for as long as the
    finding is open (:func:`argus.diagnose.findings.id_of`); ``owner`` has to act (:data:`argus.diagnose.kinds.OWNERS`).
    Of a hang ``collective`` is there where it is known."""

    id: str
    owner: str

    kind: str
    ranks: list[int]
    hosts: list[str]
    steps: list[int]
    phase: str
    kernels: list[str]
    slowdown: float
    share: float
    confidence: float
    level: str
    evidence: list[Evidence]
    action: str


class Coverage(TypedDict):
    """Whether everything was seen: ``dropped`` names each loss counter above 0. ``ended``: the trace closed its books;
    without that, what was lost since they were last written (every two seconds) is not known."""

    complete: bool
    dropped: dict[str, int]
    ended: bool


PARTS = (
    "phases",
    "gpu",
    "gpu_phases",
    "ranks",
    "kernels",
    "main_thread",
    "lines_on_cpu",
    "lines_off_cpu",
    "garbage",
)
"""Every part of a breakdown."""


class Item(TypedDict):
    """What takes a ``share`` of the time that its part is about, 0 to 1."""

    name: str
    share: float


class Part(TypedDict):
    """Where time goes by one measure (``part``: one of :data:`PARTS`), in words, by share, and the query behind it."""

    part: str
    text: str
    items: list[Item]
    sql: str


class _StepMs(TypedDict, total=False):
    step_ms: float


class Breakdown(_StepMs):
    """Where the time of some ``ranks`` goes, in ``steps`` (first and last; empty: there are none) of ``seconds``
    together; ``step_ms`` is the median step. ``advice``: what is worth trying first, at most two sentences."""

    ranks: list[int]
    steps: list[int]
    seconds: float
    parts: list[Part]
    advice: list[str]


class _WhatIf(TypedDict, total=False):
    whatif: dict[str, Any]
    breakdown: Breakdown


class Verdict(_WhatIf):
    """The verdict on one run of one job. ``reason`` is why a verdict is inconclusive, or what a healthy job went
    through before; ``whatif`` is there only where the step's dependencies are known, ``breakdown`` where there is
    nothing to compare or nothing wrong."""

    schema: str
    job: str
    run: int
    ranks: int
    steps: list[int]
    status: Status
    slowdown: float
    findings: list[Finding]
    coverage: Coverage
    reason: str


NOTABLE_SLOWDOWN = 1.005
"""Less is shown as none: texts have two decimals."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a verdict."""
    schema = json.loads(Path(__file__).with_name("verdict.schema.json").read_text())
    assert isinstance(schema, dict)
    return schema


def to_json(verdict: Verdict | Finding, *, indent: int | None = 2) -> str:
    """A verdict (or one finding of it) as JSON: plain numbers only (NaN is no JSON)."""
    return json.dumps(verdict, indent=indent, allow_nan=False, ensure_ascii=False)
