"""What ``argus trace`` shows while it runs: pages of exactly as many lines as the terminal has, from a ``View``.

What matters is first: the verdict, the step time, the finding with its evidence and action, the ranks that differ.
Where room is short, what is last goes first. ``cli/screen.py`` puts it on the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from argus.diagnose.follow.standing import Standing
from argus.diagnose.verdict import Finding
from argus.live.display.recent import COMPUTING, DATA, OTHER, WAITING
from argus.live.display.stack_view import HotLine
from argus.live.display.view import JobView, RankView, View
from argus.live.gpu.describe import GpuView
from argus.model.counters import describe, describe_all, numbered
from argus.model.text import counted, printable, shortened
from argus.model.units import duration, elapsed, rate, size

from .drawing import GLYPHS, bar, sparkline, wrapped
from .verdict_text import STYLES, kind, plain_evidence, who

STALE_NS = 10_000_000_000
"""Numbers older than this are reported as old; GPU windows close about five seconds after their end."""
SILENT_S, SILENT_STEPS = 10.0, 5.0
"""Without a step for so long, and for so many typical steps, the step line shows that."""
ALIKE = 0.05
"""Ranks that are behind by less than this share of a step are alike."""
SEEN = 0.01
"""Smallest share of a hot line in the overview."""
RANKS_SHOWN = 5
"""Ranks shown unless the user scrolls."""
LEGEND = {
    "GPU": {COMPUTING: "GPU computing", WAITING: "only NCCL", OTHER: "GPU idle"},
    "phases": {COMPUTING: "computing", WAITING: "communication", DATA: "data loading", OTHER: "other"},
    "stacks": {COMPUTING: "main thread on CPU", WAITING: "waiting", OTHER: "queued for a CPU"},
}
"""What parts of a rank's time are called, by where they come from."""
PAGES = {"?": "help", "d": "evidence", "s": "stacks", "l": "hottest lines", "g": "gpu"}
HELP = (
    ("q", "quit: end the trace and sum up"),
    ("?", "this help"),
    ("d", "findings with all of their evidence"),
    ("s", "hottest stacks of main threads, on the CPU and off it"),
    ("l", "hottest lines, on the CPU and off it"),
    ("g", "GPUs, launches, collectives of each rank; top kernels"),
    ("up/down, PgUp/PgDn", "scroll ranks, or the page"),
    ("Tab", "next job"),
    ("Esc", "back to the overview"),
    ("Ctrl-C", "the same as q; twice: at once, without storing what is left"),
    ("Ctrl-Z", "suspend Argus (the job runs on); fg resumes"),
)
Standings = Mapping[tuple[str, int], Standing]


@dataclass
class Scene:
    """What the user looks at.

    Attributes:
        page: A key of :data:`PAGES`, or empty: the overview.
        scroll: First line of the page, or first rank of the overview.
        all_ranks: The overview lists all ranks, as many as fit; else those that differ.
        job: How often Tab was pressed.
        quit: Whether the trace is to end.
    """

    page: str = ""
    scroll: int = 0
    all_ranks: bool = False
    job: int = 0
    quit: bool = False

    def press(self, key: str, height: int = 24) -> None:
        """Reacts to a key, as ``cli.screen.Screen.keys`` names them."""
        if key == "q":
            self.quit = True
        elif key == "escape":
            self.page, self.scroll, self.all_ranks = "", 0, False
        elif key in PAGES:
            self.page, self.scroll = ("" if self.page == key else key), 0
        elif key == "tab":
            self.job, self.scroll = self.job + 1, 0
        elif key in ("up", "down", "pageup", "pagedown", "home", "end"):
            step = {"up": -1, "down": 1, "pageup": 5 - height, "pagedown": height - 5, "home": -(10**6), "end": 10**6}
            down = step[key] > 0
            if self.page or (self.all_ranks and (down or self.scroll)):
                self.scroll = max(self.scroll + step[key], 0)
            else:
                self.all_ranks = down


@dataclass
class _Section:
    """Part of the overview. ``draw``: so many lines → at most as many; ``least`` of them or it is left out."""

    least: int
    most: int
    draw: Callable[[int], list[Text]]
    given: int = 0

    def grow(self, room: int) -> int:
        """Takes up to ``room`` more lines; returns how many."""
        extra = min(self.most - self.given, room) if self.most else 0
        self.given += extra
        return extra


def frame(
    view: View, standings: Standings, scene: Scene, width: int, height: int, *, diagnosis: str = "on"
) -> list[Text]:
    """A page of exactly ``height`` lines, none of which is to be wrapped.

    Args:
        view: The session now.
        standings: What is the matter with each run, by (job, run).
        scene: What the user looks at; its scroll is brought within bounds.
        width, height: Of the terminal.
        diagnosis: "on", or "off: why": then no verdict is to come.
    """
    job = chosen_job(view, standings, scene)
    standing = None if job is None else standings.get((job.name, job.run))
    head = [_header(view, job, standing, scene, width, diagnosis)]
    if scene.page:
        body = _page(view, job, standing, scene.page, width)
        room = max(height - len(head) - 2, 1)
        scene.scroll = min(scene.scroll, max(len(body) - room, 0))
        left = len(body) - room - scene.scroll
        more = Text(f"{left} more: PgDn" if left > 0 else "", style="dim")
        return _filled([*head, Text(), *body[scene.scroll : scene.scroll + room]], more, height)
    head.append(_step_line(view, job, width))
    sections = [
        _finding(standing, width, diagnosis, job is not None and job.step >= 0),
        _ranks(view, job, standing, scene, width),
        _where(view, width),
        _hottest(view, width),
        _kernels(view, width),
    ]
    return _filled(head + _arranged(sections, height - len(head) - 1), _health(view), height)


def _arranged(sections: Sequence[_Section], room: int) -> list[Text]:
    """Sections, the most important first, in ``room`` lines: first what each needs, then all of the first two (the
    finding, the ranks), air between sections, and more of the others; the last one if then there is room for it."""
    for section in sections[:-1]:
        if section.most and section.least <= room:
            section.given = section.least
            room -= section.least
    for section in sections[:2]:
        room -= section.grow(room)
    air = min(sum(section.given > 0 for section in sections), room)
    room -= air
    for section in sections[2:]:
        if section.given or section.least < room:
            room -= section.grow(room)
    lines: list[Text] = []
    for section in sections:
        if section.given:
            if air > 0 or room > 0:
                lines.append(Text())
                room -= air <= 0
                air -= 1
            lines += section.draw(section.given)
    return lines


def _filled(lines: list[Text], last: Text, height: int) -> list[Text]:
    lines = lines[: max(height - 1, 1)]
    return [*lines, *(Text() for _ in range(height - 1 - len(lines))), last][:height]


def chosen_job(view: View, standings: Standings, scene: Scene) -> JobView | None:
    """The job that is shown: the one that fares worst, else the newest that runs; Tab goes on from there."""
    order = {"hung": 0, "degraded": 1}

    def key(place: int) -> tuple[bool, int, int]:
        job = view.jobs[place]
        standing = standings.get((job.name, job.run))
        return not job.live, order.get(standing.status if standing is not None else "", 2), -place

    jobs = [view.jobs[place] for place in sorted(range(len(view.jobs)), key=key)]
    return jobs[scene.job % len(jobs)] if jobs else None


def status_of(job: JobView | None, standing: Standing | None, diagnosis: str) -> str:
    """A word on how the job fares."""
    if standing is not None and standing.status != "inconclusive":
        return standing.status
    if job is None or job.step < 0:
        return "finding steps" if job is not None and job.calls else "no steps yet"
    return "watching" if diagnosis == "on" else "tracing"


def _header(
    view: View, job: JobView | None, standing: Standing | None, scene: Scene, width: int, diagnosis: str
) -> Text:
    status = status_of(job, standing, diagnosis)
    parts = []
    if job is not None:
        ranks = counted(job.ranks, "rank") + (f" of {job.world}" if job.world > job.ranks else "")
        parts = [ranks, f"step {job.step:,}" if job.step >= 0 else "", elapsed(view.elapsed_s)]
    else:
        parts = [elapsed(view.elapsed_s)]
    if scene.page:
        hints = [f"{PAGES[scene.page]}: Esc back, q quit", "Esc back"]
    else:
        hints = ["Tab job, q quit, ? help"] if len(view.jobs) > 1 else []
        hints += ["q quit, ? help", "? help"]
    tail = "  ".join(part for part in parts if part)
    so_far = " so far" if standing is not None and standing.provisional else ""
    if width - len(status) - len(so_far) - len(tail) - 6 < 8:  # a name needs so much
        so_far = ""
    head = Text(f" {status.upper()}{so_far} ", style=STYLES.get(status, "bold cyan") + " reverse")
    room = width - len(head) - len(tail) - 4
    if job is not None:
        name = shortened(job.name, max(min(room, max(24, room - len(hints[0]) - 2)), 8))
        head.append(f" {name}", style="bold")
    head.append(f"  {tail}", style="dim")
    if fits := [keys for keys in hints if width - head.cell_len - len(keys) >= 2]:
        head.append(" " * (width - head.cell_len - len(fits[0])) + fits[0], style="dim")
    return head


def _step_line(view: View, job: JobView | None, width: int) -> Text:
    if job is None:
        return Text("no process is a rank yet: it becomes one with its first call", style="dim")
    if not job.step_ms:
        calls = "its calls come, their period is not known yet" if job.calls else "no call that marks steps either"
        return Text(f"no step seen yet: {calls}", style="dim")
    typical = float(np.median(job.step_ms[-32:]))
    text = Text(f"step {_ms(typical)} ", style="bold")
    best = min(float(np.median(part)) for part in np.array_split(job.step_ms, max(len(job.step_ms) // 16, 1)))
    after = f" (was {_ms(best)})" if typical > 1.1 * best else ""
    silent_s = (view.monotonic_ns - job.newest_ns) / 1e9 if job.newest_ns else 0.0
    if job.live and silent_s > SILENT_S and silent_s > SILENT_STEPS * typical / 1e3:
        after += f" no step seen for {elapsed(silent_s)}"
    text.append(sparkline(job.step_ms, max(width - len(text) - len(after) - 1, 0)), style="cyan")
    text.append(after, style="bold yellow")
    return text


def _ms(ms: float) -> str:
    return duration(ms * 1e6)


def _column(ms: float | None) -> str:
    return "" if ms is None else _ms(ms)


# ---- findings


def _finding(standing: Standing | None, width: int, diagnosis: str, steps: bool) -> _Section:
    if standing is not None and standing.findings:
        first = standing.findings[0]
        more = len(standing.findings) - 1

        def draw(room: int) -> list[Text]:
            return finding_lines(first, more, width, room)

        return _Section(3, len(draw(12)), draw)
    if standing is not None and standing.reason:
        reason = [Text(line, style="dim") for line in wrapped(standing.reason, width, most=2)]
        return _Section(1, len(reason), lambda room: reason[:room])
    if standing is None and steps:
        coming = "the first verdict comes within some seconds"
        return _Section(1, 1, lambda _: [Text(coming if diagnosis == "on" else f"diagnosis {diagnosis}", style="dim")])
    return _Section(0, 0, lambda _: [])


def finding_lines(finding: Finding, more: int, width: int, room: int) -> list[Text]:
    """A finding in at most ``room`` lines: title, evidence, action; ``more``: how many others there are."""
    title = Text(kind(finding), style="bold red")
    if named := who(finding):
        title.append(f"  {named}", style="bold")
    cost = "" if finding["kind"] == "hang" else f"  {finding['slowdown']:.2f}x"
    title.append(f"{cost}  since step {finding['steps'][0]}")
    if more:
        title.append(f"   d: {more} more", style="dim")
    evidence = plain_evidence(finding)
    evidence = [*evidence[:1], *evidence[1:][-1:]]  # where a line of code is named, it is the last
    action = finding["action"]
    # Sentences are cut to fewer and fewer lines, and the action last.
    for each, of_action, texts in ((2, 3, evidence), (1, 3, evidence), (1, 2, evidence), (1, 2, evidence[:1]),
                                   (1, 1, evidence[:1])):  # fmt: skip
        lines = [title]
        for text in texts:
            lines += [Text(line) for line in wrapped(text, width, first="  · ", rest="    ", most=each)]
        action_lines = wrapped(action, width, first="  → ", rest="    ", most=of_action)
        lines += [Text(line, style="bold") for line in action_lines]
        if len(lines) <= room:
            break
    return lines[:room]


# ---- ranks


def behind(rank: RankView, usual_ms: float) -> float:
    """By how much a rank is behind the others, ms: its lateness, or what it takes longer for its own part of a step."""
    own = 0.0 if rank.own_ms is None or not usual_ms else rank.own_ms - usual_ms
    return max(rank.late_ms or 0.0, own, 0.0)


def by_lateness(ranks: Sequence[RankView], named: Sequence[int]) -> tuple[list[RankView], int]:
    """Ranks, those that a finding names first, then those that are most behind; and how many of them differ."""
    owns = [rank.own_ms for rank in ranks if rank.own_ms is not None]
    usual = float(np.median(owns)) if owns else 0.0
    step_ms = float(np.median([rank.step_ms for rank in ranks])) if ranks else 0.0

    def score(rank: RankView) -> tuple[int, float]:
        first = named.index(rank.rank) if rank.rank in named else len(named)
        return first, -round(behind(rank, usual) / max(ALIKE * step_ms, 1e-3)) if step_ms else 0.0

    chosen = sorted(ranks, key=lambda rank: (rank.state == "traced", *score(rank), rank.rank))
    differ = sum(
        rank.state != "traced" or rank.rank in named or (step_ms > 0 and behind(rank, usual) > ALIKE * step_ms)
        for rank in ranks
    )
    return chosen, differ


def _ranks(view: View, job: JobView | None, standing: Standing | None, scene: Scene, width: int) -> _Section:
    if job is None:
        return _Section(0, 0, lambda _: [])
    of_job = [rank for rank in view.ranks if (rank.job, rank.run) == (job.name, job.run)]
    named = standing.findings[0]["ranks"] if standing is not None and standing.findings else []
    ranks, differ = by_lateness(of_job, named)

    def draw(room: int) -> list[Text]:
        return rank_lines(ranks, differ, named, scene, width, room)

    wanted = _rank_rows(len(ranks), differ, scene)
    most = 1 + wanted + (wanted < len(ranks))
    return _Section(min(most, 4), most, draw)


def _rank_rows(count: int, differ: int, scene: Scene) -> int:
    """How many ranks are wanted: those that differ, and some that do not to compare them with."""
    wanted = count if scene.all_ranks else min(max(differ + 1, 3), RANKS_SHOWN, count)
    return count if wanted == count - 1 else wanted  # a line that counts one rank has room for that rank


def rank_lines(
    ranks: Sequence[RankView], differ: int, named: Sequence[int], scene: Scene, width: int, room: int
) -> list[Text]:
    """A heading, the ranks that there is room for, and what the others are like."""
    # Every column for all rows or for none: a job has no lateness without collectives of several ranks.
    timed = any(rank.step_ms > 0 for rank in ranks)
    owned = timed and any(rank.own_ms is not None for rank in ranks)
    late = len(ranks) > 1 and any(rank.late_ms is not None for rank in ranks)
    by = next((rank.by for rank in ranks if rank.by), "")
    heading = Text("rank", style="bold")
    fixed = 6
    for wanted, name in ((timed and not owned, "step"), (owned, "own time"), (late, "late by")):
        if wanted:
            heading.append(f"{name:>11}")
            fixed += 11
    if by:
        heading.append_text(_legend(ranks, by, width - heading.cell_len))
    rows = min(_rank_rows(len(ranks), differ, scene), max(room - 1, 0))
    if rows < len(ranks):
        rows = max(min(rows, room - 2), 1)
    scene.scroll = min(scene.scroll, len(ranks) - rows)
    shown = ranks[scene.scroll :][:rows]
    lines = [heading]
    for rank in shown:
        row = Text(f"{rank.rank:>4}", style="bold red" if rank.rank in named else "")
        if timed and not owned:
            row.append(f"{_column(rank.step_ms or None):>11}")
        if owned:
            row.append(f"{_column(rank.own_ms):>11}")
        if late:
            row.append(f"{_column(rank.late_ms):>11}")
        row.append("  ")
        if rank.state != "traced":
            row.append(rank.state, style="yellow")
        elif rank.parts:
            row.append_text(bar(rank.parts, max(min(width - fixed - 2, 60), 10)))
        lines.append(row)
    if rows < len(ranks):
        left = len(ranks) - scene.scroll - rows
        late_ones = max(differ - scene.scroll - rows, 0)
        if scene.all_ranks:
            text = f"{scene.scroll} above, {left} below"
        elif late_ones:
            text = f"{left} more, {late_ones} of them behind (arrow keys)"
        else:
            text = f"{left} others alike (arrow keys)"
        lines.append(Text(f"      {text}", style="dim"))
    return lines[:room]


def _legend(ranks: Sequence[RankView], by: str, width: int) -> Text:
    """What the bars' parts are: the largest that there is room for."""
    sums = {part: sum(rank.parts.get(part, 0.0) for rank in ranks if rank.parts) for part in LEGEND[by]}
    entries: dict[str, Text] = {}
    for part in sorted(sums, key=lambda part: -sums[part]):
        glyph, style = GLYPHS[part]
        entry = Text.assemble("  ", (glyph, style), f" {LEGEND[by][part]}")
        if sum(other.cell_len for other in entries.values()) + entry.cell_len <= width:
            entries[part] = entry
    return Text.assemble(*(entries[part] for part in LEGEND[by] if part in entries))


# ---- where time goes


def _where(view: View, width: int) -> _Section:
    lines = [Text(line if len(line) <= width else f"{line[: width - 1]}…") for line in view.steps_go]
    return _Section(min(len(lines), 1), len(lines), lambda room: lines[:room])


def _hot_row(line: HotLine, width: int) -> Text:
    ranks = ("rank " if line.ranks == 1 else "ranks ") + shortened(line.who, 12)
    tail = f"  {line.reason}" * bool(line.reason) + f"  {ranks}"
    return Text(f"{line.share:>4.0%}  {shortened(line.text, max(width - len(tail) - 6, 8))}").append(tail, style="dim")


def _hottest(view: View, width: int) -> _Section:
    on, off = ([line for line in lines if line.share >= SEEN] for lines in (view.stacks.lines, view.stacks.off_lines))
    both = ("hottest lines on the CPU", on), ("main threads off the CPU", off)
    halves = [(title, lines) for title, lines in both if lines]
    if not halves:
        return _Section(0, 0, lambda _: [])

    def draw(room: int) -> list[Text]:
        out = []
        for number, (title, lines) in enumerate(halves):
            share = room // len(halves) + (number < room % len(halves))
            out += [Text(title, style="bold"), *(_hot_row(line, width) for line in lines[: share - 1])]
        return out

    return _Section(2 * len(halves), len(halves) + sum(min(len(lines), 6) for _, lines in halves), draw)


def _kernels(view: View, width: int) -> _Section:
    rows = kernel_lines(view, width, 5)
    return _Section(2, len(rows), lambda room: rows[:room]) if len(rows) > 1 else _Section(0, 0, lambda _: [])


def kernel_lines(view: View, width: int, most: int) -> list[Text]:
    """Top kernels by GPU time, or by launches where that is not known; a heading first."""
    if view.gpu_kernels:
        rows = [Text("top kernels by GPU time", style="bold")]
        for name, calls, total_ns in view.gpu_kernels[:most]:
            tail = f"  {calls:,} x {duration(total_ns / max(calls, 1))}"
            share = total_ns / max(view.gpu_kernel_ns, 1)
            rows.append(Text(f"{share:>4.0%}  {shortened(name or '(no name)', max(width - len(tail) - 6, 8))}{tail}"))
        return rows
    rows = [Text("top kernels by launches", style="bold")]
    for name, count in view.kernels[:most]:
        rows.append(Text(f"{count:>9,}  {shortened(name, max(width - 11, 8))}"))
    return rows


def _health(view: View) -> Text:
    """Argus itself, in a line: what it costs, then what was lost, whose text may be cut."""
    text = Text("Argus: ", style="dim")
    if view.store_error:
        text.append(f"store away, {size(view.waiting_bytes)} waiting: {view.store_error}  ", style="yellow")
    if view.overhead is not None:
        text.append(f"overhead {view.overhead:.2%}, ", style="dim")
    text.append(f"CPU {view.cpu_share:.1%}, ring {view.ring_fill:.0%}, ", style="dim")
    if view.lost:
        name, value = max(view.lost.items(), key=lambda item: item[1])
        more = f" and {len(view.lost) - 1} more" if len(view.lost) > 1 else ""
        text.append(f"{describe(name, value)}{more}", style="yellow")
    else:
        text.append("nothing lost", style="dim")
    if view.notes:
        text.append(f"  note: {view.notes[-1]}", style="dim")
    return text


# ---- pages


def _page(view: View, job: JobView | None, standing: Standing | None, page: str, width: int) -> list[Text]:
    if page == "?":
        return _help(width)
    if page == "d":
        return _evidence(standing, width)
    if page == "s":
        return _stacks(view, width)
    if page == "l":
        return _lines(view, width)
    return _gpus(view, job, width)


def _help(width: int) -> list[Text]:
    lines = [Text.assemble((f"{key:>18}  ", "bold"), what) for key, what in HELP]
    lines.append(Text())
    for text in (
        "own time: what a rank spends of a step without waiting for others. late by: how much later than the first "
        "rank it comes to collectives, typically. Both of the newest steps.",
        "The step line has a block for each of the newest steps, the median of all ranks.",
    ):
        lines += [Text(line, style="dim") for line in wrapped(text, width)]
    return lines


def _evidence(standing: Standing | None, width: int) -> list[Text]:
    if standing is None:
        return [Text("no verdict yet", style="dim")]
    if not standing.findings:
        return [Text(line) for line in wrapped(standing.reason or f"{standing.status}: no finding", width)]
    lines: list[Text] = []
    for number, finding in enumerate(standing.findings, 1):
        title = Text(f"{number}. {kind(finding)}", style="bold red")
        title.append(f"  {who(finding)}  since step {finding['steps'][0]}", style="bold")
        title.append(f"  confidence {finding['confidence']:.0%}", style="dim")
        lines.append(title)
        for each in finding["evidence"]:
            lines += [Text(line) for line in wrapped(each["text"], width, first="  · ", rest="    ")]
        lines += [Text(line, style="bold") for line in wrapped(finding["action"], width, first="  → ", rest="    ")]
        lines.append(Text())
    return lines


def _stacks(view: View, width: int) -> list[Text]:
    if not view.stacks.stacks:
        return [Text(line, style="dim") for line in wrapped(f"no stacks: {view.stacks.state}", width)]
    lines: list[Text] = []
    for stack in view.stacks.stacks:
        reason = f"off the CPU ({stack.line.reason})" if stack.line.reason else "on the CPU"
        lines.append(Text(f"{stack.line.share:.0%} {reason}, {_of_ranks(stack.line)}", style="bold"))
        lines += [Text("  " + shortened(name, width - 2)) for name in stack.frames]
        lines.append(Text())
    return lines


def _of_ranks(line: HotLine) -> str:
    return f"rank {line.who}" if line.ranks == 1 else f"ranks {line.who}"


def _lines(view: View, width: int) -> list[Text]:
    lines = [Text("hottest lines on the CPU, of all threads' CPU time", style="bold")]
    lines += [_hot_row(line, width) for line in view.stacks.lines] or [Text("none seen", style="dim")]
    lines += [Text(), Text("main threads off the CPU, of their time", style="bold")]
    lines += [_hot_row(line, width) for line in view.stacks.off_lines] or [Text("none seen", style="dim")]
    if view.stacks.waits:
        waits = ", ".join(f"{reason} {seconds:.2f}" for reason, seconds in view.stacks.waits)
        lines += [Text(), *map(Text, wrapped(f"threads that wait, on average: {waits}", width))]
    return lines


def _gpus(view: View, job: JobView | None, width: int) -> list[Text]:
    lines: list[Text] = []
    if any(row.busy is not None for row in view.gpu):
        lines.append(Text("rank    busy  only NCCL  NCCL+other  idle gaps  queue", style="bold"))
        for row in view.gpu:
            lines.append(
                Text(
                    f"{row.rank:>4}{_percent(row.busy):>8}{_percent(row.exposed):>11}{_percent(row.overlapped):>12}"
                    f"{'' if row.idle_gaps is None else rate(row.idle_gaps):>11}"
                    f"{'' if row.queue_depth is None else f'{row.queue_depth:.1f}':>7}  "
                ).append(_remark(row, view.monotonic_ns), style="yellow")
            )
    else:
        states = list(dict.fromkeys(row.text for row in view.gpu)) or ["no GPU is used"]
        for text in states[:3]:
            lines += [Text(line, style="dim") for line in wrapped(f"GPU times: {text}", width)]
    own = [rank for rank in view.ranks if job is None or (rank.job, rank.run) == (job.name, job.run)]
    columns = {
        "launches": (11, [rate(rank.launch_rate) for rank in own], any(rank.launch_rate for rank in own)),
        "collectives": (13, [rate(rank.collective_rate) for rank in own], any(rank.collective_rate for rank in own)),
        "steps": (11, [f"{rank.steps:,}" for rank in own], True),
    }
    shown = [(title, wide, cells) for title, (wide, cells, some) in columns.items() if some]
    lines += [Text(), Text("rank       pid" + "".join(f"{title:>{wide}}" for title, wide, _ in shown), style="bold")]
    for at, rank in enumerate(own):
        counts = "".join(f"{cells[at]:>{wide}}" for _, wide, cells in shown)
        lines.append(Text(f"{rank.rank:>4}{rank.pid:>10}{counts}"))
    if view.gpu_kernels or view.kernels:
        lines += [Text(), *kernel_lines(view, width, 8)]
    if view.collectives:
        lines += [Text(), Text("collectives", style="bold")]
        lines += [Text(f"{count:>9,}  {size(nbytes):>9}  {op}") for op, count, nbytes in view.collectives]
    return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _remark(row: GpuView, now_ns: int) -> str:
    """What somebody who reads the numbers has to know."""
    if row.state != "on":
        return row.text
    if row.ended_ns and now_ns - row.ended_ns > STALE_NS:
        return f"nothing has ended on the GPU for {elapsed((now_ns - row.ended_ns) / 1e9)}"
    if row.match_rate is not None and row.match_rate < 0.99:
        return f"{row.match_rate:.0%} matched with their launch"
    return ""


# ---- a log's line


def plain_line(view: View, standings: Standings) -> str:
    """One line for a log: the overview without the tables."""
    steps = [row.last_step for row in view.ranks if row.steps]
    times = [row.step_ms for row in view.ranks if row.steps]
    calls = view.launches + view.collective_calls
    status = [
        standing.status + " so far" * standing.provisional
        for standing in standings.values()
        if standing.status != "inconclusive"
    ]
    parts = [f"{view.elapsed_s:7.1f} s", *status[:1], counted(len(view.ranks), "rank")]
    if view.launches:
        parts.append(numbered("{n} launch[es]", view.launches))
    if view.collective_calls:
        parts.append(counted(view.collective_calls, "collective"))
    if steps:
        parts.append(f"step {max(steps):,}, {_ms(sum(times) / len(times))}")
    else:
        parts.append("finding steps" if calls else "no steps yet")
    if busy := [row.busy for row in view.gpu if row.busy is not None]:
        parts.append(f"GPU busy {sum(busy) / len(busy):.0%}")
    if view.stacks.lines:
        parts.append(f"hottest {view.stacks.lines[0].text} {view.stacks.lines[0].share:.0%}")
    parts.append(f"lost: {describe_all(view.lost)}" if view.lost else "nothing lost")
    if view.overhead is not None:
        parts.append(f"overhead {view.overhead:.2%}")
    parts.append(f"Argus CPU {view.cpu_share:.1%}")
    if view.store_error:
        parts.append(f"store away, {size(view.waiting_bytes)} waiting: {view.store_error}")
    return printable("  ".join(parts))
