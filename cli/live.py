"""The picture that ``argus trace`` shows while it runs."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from argus.trace import View

MAX_RANKS_SHOWN = 16
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size(nbytes: float) -> str:
    """Bytes as people read them, in decimal units."""
    for unit in _UNITS:
        if abs(nbytes) < 1000 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def rate(per_second: float) -> str:
    """A rate with three digits: 12/s, 3.4k/s."""
    if per_second >= 1e6:
        return f"{per_second / 1e6:.1f}M/s"
    if per_second >= 1e3:
        return f"{per_second / 1e3:.1f}k/s"
    return f"{per_second:.0f}/s"


def clip(text: str, width: int) -> str:
    """Text of at most ``width`` characters, its middle left out: kernel names differ at both ends."""
    if len(text) <= width:
        return text
    keep = width - 1
    return text[: keep - keep // 3] + "…" + text[-(keep // 3) :]


def picture(view: View, width: int = 100) -> RenderableType:
    """The whole live view."""
    ranks = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (
        ("rank", "right"),
        ("pid", "right"),
        ("launches", "right"),
        ("collectives", "right"),
        ("steps", "right"),
        ("last step", "right"),
        ("", "left"),
    ):
        ranks.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in view.ranks[:MAX_RANKS_SHOWN]:
        ranks.add_row(
            str(row.rank),
            str(row.pid),
            rate(row.launch_rate),
            rate(row.collective_rate),
            str(row.steps) if row.steps else "…",
            f"#{row.last_step}  {row.step_ms:.1f} ms" if row.steps else "finding the period",
            "" if row.state == "traced" else Text(row.state, style="yellow"),
        )
    if len(view.ranks) > MAX_RANKS_SHOWN:
        ranks.add_row("…", f"{len(view.ranks) - MAX_RANKS_SHOWN} more")

    kernels = Table(box=None, pad_edge=False, header_style="bold")
    kernels.add_column("top kernels by launches")
    kernels.add_column("launches", justify="right")
    for name, count in view.kernels:
        kernels.add_row(clip(name, max(width - 24, 30)), f"{count:,}")

    traffic = Table(box=None, pad_edge=False, header_style="bold")
    traffic.add_column("collectives")
    traffic.add_column("calls", justify="right")
    traffic.add_column("bytes", justify="right")
    for op, count, nbytes in view.collectives:
        traffic.add_row(op, f"{count:,}", size(nbytes))

    # Totals and losses first: on a small terminal the rest is cut off.
    parts: list[RenderableType] = [totals(view), Text(), ranks, Text()]
    if view.kernels:
        parts += [kernels, Text()]
    if view.collectives:
        parts += [traffic, Text()]
    parts += [Text(f"note: {note}", style="dim") for note in view.notes[-3:]]
    return Panel(Group(*parts), title="argus trace", subtitle="Ctrl-C ends and sums up", title_align="left")


def totals(view: View) -> Text:
    """Totals, losses and Argus's own cost in a line."""
    text = Text()
    text.append(f"{view.elapsed_s:.0f} s   {view.launches:,} launches   {view.collective_calls:,} collectives   ")
    lost = sum(view.lost.values())
    if lost:
        text.append("lost: " + ", ".join(f"{name} {value:,}" for name, value in view.lost.items()), style="bold red")
    else:
        text.append("lost 0", style="green")
    text.append(f"   ring {view.ring_fill:.0%}   Argus CPU {view.cpu_share:.1%} of a core")
    if view.store_error:
        text.append(f"\nstore away, {size(view.waiting_bytes)} waiting: {view.store_error}", style="yellow")
    return text


def plain_line(view: View) -> str:
    """One line for a log: what a terminal's picture says, less the tables."""
    steps = [row.last_step for row in view.ranks if row.steps]
    times = [row.step_ms for row in view.ranks if row.steps]
    where = f"step {max(steps)}, {sum(times) / len(times):.1f} ms" if steps else "finding the period"
    lost = ", ".join(f"{name} {value}" for name, value in view.lost.items()) or "0"
    return (
        f"{view.elapsed_s:7.1f} s  {len(view.ranks)} ranks  {view.launches} launches"
        f"  {view.collective_calls} collectives  {where}  lost {lost}  cpu {view.cpu_share:.1%}"
        + (f"  store away, {size(view.waiting_bytes)} waiting: {view.store_error}" if view.store_error else "")
    )
