"""A verdict on a terminal and in plain lines: ``argus diagnose``, the live view and the end of a trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click
from rich.console import Console
from rich.text import Text

from argus.diagnose.follow.standing import News, in_words
from argus.diagnose.verdict import NOTABLE_SLOWDOWN, Breakdown, Coverage, Finding, Verdict
from argus.model.counters import describe_all
from argus.model.text import counted, printable
from argus.model.units import ranks_text

STYLES = {"healthy": "bold green", "degraded": "bold red", "hung": "bold red", "inconclusive": "bold yellow"}
"""Of each status."""
SENTENCES = 2
"""Evidence shown of a finding, besides its action, unless all of it is asked for."""
Line = tuple[Text, int]
"""A line and its indentation."""
_STATISTICS = re.compile(r"\s*\((?:W1|beta|mu|sigma)\b[^()]*(?:\([^()]*\)[^()]*)*\)|[;,] (?:W1|beta|mu|sigma) [^;]*")
_ONLY_STATISTICS = re.compile(r"\b(?:W1|beta|mu|sigma)\b")
_CODE = "its stacks differ most from the others' in "
"""Begins the sentence that names a function and line."""


def who(finding: Finding) -> str:
    """Ranks and hosts of a finding."""
    return ranks_text(finding["ranks"]) + (
        f" on {printable(', '.join(finding['hosts'][:4]))}" if finding["hosts"] else ""
    )


def kind(finding: Finding) -> str:
    return finding["kind"].replace("_", " ")


def since(finding: Finding, first: int | None = None) -> str:
    """From which step on; ``first``: the first one that was seen."""
    step = finding["steps"][0]
    return "in all steps seen" if first is not None and step <= first else f"since step {step}"


def plain_evidence(finding: Finding, most: int = SENTENCES) -> list[str]:
    """The first sentences of the evidence, without statistics that only a statistician reads, and the one that names a
    function and line if it is not among them."""
    texts = [_STATISTICS.sub("", evidence["text"]) for evidence in finding["evidence"]]
    texts = [text for text in texts if not _ONLY_STATISTICS.search(text)]
    code = [text for text in texts[most:] if text.startswith(_CODE)][:1]
    return texts[:most] + code


def headline(verdict: Verdict) -> Text:
    """Status, job, ranks, steps and what it costs."""
    status = verdict["status"]
    head = Text(status.upper(), style=STYLES[status])
    head.append(f"  {printable(verdict['job'])}", style="bold not dim")
    steps = verdict["steps"]
    parts = [counted(verdict["ranks"], "rank")] if verdict["ranks"] else []
    parts += [f"steps {steps[0]} to {steps[1]}"] if steps else []
    head.append("  " + ", ".join(parts or ["no rank with steps"]), "dim")
    if status == "hung" and steps:
        head.append(f", no step since step {steps[1]}", style="bold")
    elif status == "degraded" and verdict["slowdown"] < NOTABLE_SLOWDOWN:
        head.append(", costs no time yet", style="bold")
    elif status == "degraded":
        guessed = any(e["text"].startswith("estimated") for f in verdict["findings"] for e in f["evidence"])
        about = "about " if guessed else ""
        head.append(f", {about}{verdict['slowdown']:.2f}x slower than it could be", style="bold")
    return head


BAR = 10
"""Characters of a bar."""


def bar(share: float, width: int = BAR) -> str:
    """A part of a whole as a bar: ██████▌░░░. What is above 0 has a half at least."""
    halves = min(2 * width, max(round(2 * width * share), int(share > 0)))
    return ("█" * (halves // 2) + "▌" * (halves % 2)).ljust(width, "░")


def finding_lines(
    verdict: Verdict, number: int, *, detail: bool, with_sql: bool = False, bars: bool = False
) -> Iterator[Line]:
    """A finding: what and who, since when and its cost, evidence, action. ``bars``: its share is drawn, too, where
    there are several."""
    finding = verdict["findings"][number]
    title = Text(f"{number + 1}. {kind(finding)}", style="bold")
    if named := who(finding):
        title.append(f"  {named}", style="bold red")
    yield title, 0
    hung = verdict["status"] == "hung"
    drawn = f"{bar(finding['share'])} " if bars and len(verdict["findings"]) > 1 else ""
    free = finding["slowdown"] < NOTABLE_SLOWDOWN
    cost = (
        "costs no time yet" if free else f"{finding['slowdown']:.2f}x · {drawn}{finding['share']:.0%} of the lost time"
    )
    cost = "" if hung else f" · {cost}"
    # Dumps of a job that hung know of no steps.
    begun = f"{since(finding, verdict['steps'][0])}{cost} · " if verdict["steps"] else ""
    yield Text(f"{begun}confidence {finding['confidence']:.0%} · owner: {finding['owner']}"), 3
    texts = [each["text"] for each in finding["evidence"]] if detail else plain_evidence(finding)
    for text in texts:
        yield Text(f"· {printable(text)}"), 3
    yield Text.assemble(("→ ", "bold"), printable(finding["action"])), 3
    if with_sql:
        for evidence in finding["evidence"]:
            yield Text(), 0
            yield Text(evidence["sql"], style="dim"), 5


def coverage_line(coverage: Coverage) -> Line:
    """Whether everything was seen."""
    if coverage["complete"]:
        so_far = "" if coverage["ended"] else " so far (the trace goes on, or was cut off)"
        return Text(f"coverage: complete{so_far}", style="dim"), 0
    return Text(f"coverage: incomplete ({describe_all(coverage['dropped'])})", style="yellow"), 0


def verdict_lines(verdict: Verdict, *, detail: bool, with_sql: bool = False, bars: bool = False) -> Iterator[Line]:
    """The verdict, without its coverage.

    Args:
        verdict: The verdict.
        detail: All evidence, with statistics; else what :func:`plain_evidence` chooses.
        with_sql: With the query behind each evidence.
        bars: Shares are drawn, too: for terminals.
    """
    yield headline(verdict), 0
    if verdict["reason"]:
        yield Text(printable(verdict["reason"])), 2
    for number in range(len(verdict["findings"])):
        yield Text(), 0
        yield from finding_lines(verdict, number, detail=detail, with_sql=with_sql, bars=bars)
    if "breakdown" in verdict:
        yield from breakdown_lines(verdict["breakdown"], with_sql=with_sql)


PARTS = {
    "phases": "phases of a step",
    "gpu": "GPU",
    "gpu_phases": "GPU, by phase",
    "ranks": "ranks",
    "kernels": "kernels",
    "main_thread": "main thread",
    "lines_on_cpu": "on the CPU",
    "lines_off_cpu": "off the CPU",
    "garbage": "garbage collection",
}
"""What each part of a breakdown is called."""


def breakdown_lines(breakdown: Breakdown, *, with_sql: bool = False) -> Iterator[Line]:
    """Where the time goes, and what is worth trying first."""
    from argus.diagnose.breakdown import heading

    yield Text(), 0
    yield Text(f"where the time goes ({heading(breakdown)})", style="bold"), 0
    width = max((len(PARTS[part["part"]]) for part in breakdown["parts"]), default=0)
    for part in breakdown["parts"]:
        yield Text(f"{PARTS[part['part']]:{width}}  {printable(part['text'])}"), 3
        if with_sql:
            yield Text(), 0
            yield Text(part["sql"], style="dim"), 5
            yield Text(), 0
    if breakdown["advice"]:
        yield Text("worth trying first", style="bold"), 0
    for number, text in enumerate(breakdown["advice"], 1):
        yield Text(f"{number}. {printable(text)}"), 3


def has_more(verdict: Verdict) -> bool:
    """Whether there is evidence that :func:`verdict_lines` leaves out unless it is asked for."""
    return any(
        [each["text"] for each in finding["evidence"]] != plain_evidence(finding) for finding in verdict["findings"]
    )


def show(console: Console, lines: Iterable[Line]) -> None:
    """Prints lines: folded on a terminal, whole when piped, since grep wants whole lines and a query must survive
    copying."""
    for text, indent in lines:
        if not text.plain.replace("\n", "").isprintable():
            # In place, so that colours stay where they were. Queries have several lines.
            text.plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in text.plain)
        if console.is_terminal:
            # What goes on is indented below the text, not below its bullet.
            hang = 2 if text.plain[:2] in ("· ", "→ ") else 0
            folded = text.wrap(console, max(console.width - indent - hang, 20)) or [Text()]
            for number, part in enumerate(folded):
                line = Text(" " * (indent + hang * (number > 0))).append_text(part)
                console.print(line, highlight=False, soft_wrap=True)
        else:
            for whole in text.plain.splitlines() or [""]:
                click.echo(" " * indent + whole if whole else "", file=console.file)


def news_lines(news: Iterable[News]) -> Iterator[str]:
    """What has changed, in plain lines: a finding with its evidence and action."""
    for each in news:
        if each.finding is None:
            yield printable(each.text)
            continue
        yield printable(f"{each.what}: {in_words(each.finding)}")
        if each.what == "found":
            yield from (f"  · {printable(text)}" for text in plain_evidence(each.finding))
            yield f"  → {printable(each.finding['action'])}"
