"""The picture that ``argus trace`` shows while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from argus.gpu import GpuView
from argus.trace import View

MAX_RANKS_SHOWN = 16
MAX_FINDINGS_SHOWN = 4
STALE_NS = 10_000_000_000
"""Numbers older than this are told to be old; windows close about five seconds after their end."""
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


def span(ns: float) -> str:
    """A duration with three digits: 950 ns, 3.4 µs, 12.5 ms."""
    for unit, factor in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if ns < 1000 * factor:
            return f"{ns / factor:.0f} {unit}" if factor == 1.0 else f"{ns / factor:.1f} {unit}"
    return f"{ns / 1e9:.1f} s"


def clip(text: str, width: int) -> str:
    """Text of at most ``width`` characters, its middle left out: kernel names differ at both ends."""
    if len(text) <= width:
        return text
    keep = width - 1
    return text[: keep - keep // 3] + "…" + text[-(keep // 3) :]


def picture(view: View, width: int = 100, findings: Sequence[str] = ()) -> RenderableType:
    """The whole live view. ``findings``: what the diagnosis says is the matter now."""
    looking = "finding the period" if view.launches + view.collective_calls else "no calls yet"
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
            f"#{row.last_step}  {row.step_ms:.1f} ms" if row.steps else looking,
            "" if row.state == "traced" else Text(row.state, style="yellow"),
        )
    if len(view.ranks) > MAX_RANKS_SHOWN:
        ranks.add_row("…", f"{len(view.ranks) - MAX_RANKS_SHOWN} more")

    kernels = Table(box=None, pad_edge=False, header_style="bold")
    if view.gpu_kernels:
        kernels.add_column("top kernels by GPU time")
        for heading in ("share", "calls", "mean"):
            kernels.add_column(heading, justify="right")
        for name, calls, total_ns in view.gpu_kernels:
            share = total_ns / max(view.gpu_kernel_ns, 1)
            kernels.add_row(
                clip(name or "(no name)", max(width - 44, 30)), f"{share:.1%}", f"{calls:,}", span(total_ns / calls)
            )
    else:
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
    found = [Text(clip(line, max(width - 4, 40)), style="bold red") for line in findings[:MAX_FINDINGS_SHOWN]]
    parts: list[RenderableType] = [totals(view), *found, Text(), ranks, Text()]
    if view.steps_go:
        parts += [*map(Text, view.steps_go), Text()]
    if view.gpu:
        parts += [_gpu_times(view), Text()]
    if view.kernels or view.gpu_kernels:
        parts += [kernels, Text()]
    if view.collectives:
        parts += [traffic, Text()]
    if view.stacks.lines or view.stacks.waits:
        parts += [_stacks(view, width), Text()]
    parts += [Text(f"note: {note}", style="dim") for note in view.notes[-3:]]
    return Panel(Group(*parts), title="argus trace", subtitle="Ctrl-C ends and sums up", title_align="left")


def _gpu_times(view: View) -> RenderableType:
    """A line a rank, once one of them has been measured; before that, and where none will be, the state."""
    if not any(row.busy is not None for row in view.gpu):
        states = list(dict.fromkeys(row.text for row in view.gpu))
        return Group(*(Text(f"GPU times: {text}", style="dim") for text in states[:3]))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("rank", "GPU busy", "idle gaps", "only NCCL", "NCCL and other", "queue"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in view.gpu[:MAX_RANKS_SHOWN]:
        table.add_row(
            str(row.rank),
            _percent(row.busy),
            "" if row.idle_gaps is None else rate(row.idle_gaps),
            _percent(row.exposed),
            _percent(row.overlapped),
            "" if row.queue_depth is None else f"{row.queue_depth:.1f}",
            Text(_remark(row, view.monotonic_ns), style="yellow"),
        )
    if len(view.gpu) > MAX_RANKS_SHOWN:
        table.add_row("…", f"{len(view.gpu) - MAX_RANKS_SHOWN} more")
    return table


def _stacks(view: View, width: int) -> RenderableType:
    """The hottest lines of Python, and what threads wait for."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("hottest lines on the CPU")
    table.add_column("share", justify="right")
    table.add_column("ranks", justify="right")
    for line in view.stacks.lines[:6]:
        table.add_row(clip(line.text, max(width - 28, 30)), f"{line.share:.1%}", str(line.ranks))
    parts: list[RenderableType] = [table]
    if view.stacks.waits:
        waits = ", ".join(f"{reason} {seconds:.2f}" for reason, seconds in view.stacks.waits)
        parts.append(Text(f"waiting, threads on average: {waits}", style="dim"))
    return Group(*parts)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _remark(row: GpuView, now_ns: int) -> str:
    """What somebody who reads the numbers has to know."""
    if row.state != "on":
        return row.text
    if row.ended_ns and now_ns - row.ended_ns > STALE_NS:
        return f"nothing has ended on the GPU for {(now_ns - row.ended_ns) / 1e9:.0f} s"
    if row.match_rate is not None and row.match_rate < 0.99:
        return f"{row.match_rate:.0%} matched with their launch"
    return ""


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
    if view.overhead is not None:
        text.append(f"   overhead {view.overhead:.2%}")
    if view.store_error:
        text.append(f"\nstore away, {size(view.waiting_bytes)} waiting: {view.store_error}", style="yellow")
    return text


def plain_line(view: View) -> str:
    """One line for a log: what a terminal's picture says, less the tables."""
    steps = [row.last_step for row in view.ranks if row.steps]
    times = [row.step_ms for row in view.ranks if row.steps]
    calls = view.launches + view.collective_calls
    looking = "finding the period" if calls else "no calls to find steps by"
    where = f"step {max(steps)}, {sum(times) / len(times):.1f} ms" if steps else looking
    lost = ", ".join(f"{name} {value}" for name, value in view.lost.items()) or "0"
    busy = [row.busy for row in view.gpu if row.busy is not None]
    gpu = f"  gpu {sum(busy) / len(busy):.0%}" if busy else ""
    hot = f"  hottest {view.stacks.lines[0].text} {view.stacks.lines[0].share:.0%}" if view.stacks.lines else ""
    return (
        f"{view.elapsed_s:7.1f} s  {len(view.ranks)} ranks  {view.launches} launches"
        f"  {view.collective_calls} collectives  {where}{gpu}{hot}  lost {lost}  cpu {view.cpu_share:.1%}"
        + ("" if view.overhead is None else f"  overhead {view.overhead:.2%}")
        + (f"  store away, {size(view.waiting_bytes)} waiting: {view.store_error}" if view.store_error else "")
    )
