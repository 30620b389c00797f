"""The verdict in one or two sentences, for the head of a page and the last line of ``argus report``."""

from __future__ import annotations

from argus.diagnose.verdict import NOTABLE_SLOWDOWN, Finding, Verdict
from argus.model.text import counted, shortened
from argus.model.units import ranks_text

MOST = 600
"""Characters."""


def summary_of(verdict: Verdict) -> str:
    """What is wrong, with whom, since when, and what it costs; or why nothing is."""
    parts = [_head(verdict)]
    findings = verdict["findings"]
    if findings:
        parts.append(_finding(findings[0], verdict))
    if len(findings) > 1:
        others = ", ".join(f"{_kind(one)} {ranks_text(one['ranks'])}".strip() for one in findings[1:4])
        parts.append(f"Also: {others}" + (f" and {len(findings) - 4} more" if len(findings) > 4 else ""))
    if verdict["reason"] and (not findings or verdict["status"] == "inconclusive"):
        parts.append(verdict["reason"][:1].upper() + verdict["reason"][1:])
    return shortened(". ".join(part.rstrip(".") for part in parts) + ".", MOST)


def _head(verdict: Verdict) -> str:
    steps, ranks = verdict["steps"], verdict["ranks"]
    where = f" ({counted(ranks, 'rank')}, steps {steps[0]} to {steps[1]})" if steps and ranks else ""
    if verdict["status"] == "degraded" and verdict["slowdown"] < NOTABLE_SLOWDOWN:
        return f"Degraded: costs no time yet{where}"
    if verdict["status"] == "degraded":
        return f"Degraded: {verdict['slowdown']:.2f}x slower than it could be{where}"
    if verdict["status"] == "hung":
        return "Hung" + (f": no step since step {steps[1]}" if steps else "") + where
    return f"{verdict['status'].capitalize()}{where}"


def _finding(finding: Finding, verdict: Verdict) -> str:
    hosts = ", ".join(finding["hosts"][:4])
    whose = ranks_text(finding["ranks"]) + (f" on {hosts}" if hosts else "")
    text = f"{_kind(finding).capitalize()}: {whose or 'all ranks'}"
    if finding["steps"] and verdict["steps"]:
        begun = finding["steps"][0]
        text += ", in all steps seen" if begun <= verdict["steps"][0] else f", since step {begun}"
    if verdict["status"] != "hung" and finding["slowdown"] >= NOTABLE_SLOWDOWN:
        text += f", {finding['share']:.0%} of the lost time"
    return text


def _kind(finding: Finding) -> str:
    return finding["kind"].replace("_", " ")
