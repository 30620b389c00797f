"""Step time under everything with `--max-overhead 0.5`, once the governor has settled, against nothing around it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.gpu_check.common import Child, Context, Session, training
from scripts.gpu_check.parts.overhead import SETTLE_S, Measured, chosen

PERCENT = 0.5
BASE_S, GOVERNED_S, FIRST_S = 8.0, 40.0, 12.0
"""Without Argus; two periods of the GPU's duty cycle; and until the governor has given up what it will."""
WINDOW_S = 2.0
FAKE = 8
"""On the fake GPU so many times shorter: that shows that it runs, no more."""


def _windows(child: Child, lasts_s: float) -> list[list[float]]:
    """Steps of the next seconds, ms, by windows."""
    child.ask("go")
    time.sleep(SETTLE_S)
    began = time.monotonic_ns()
    time.sleep(lasts_s)
    measured = Measured(child.ask("pause", 60))
    starts = began + np.arange(max(1, int(lasts_s / WINDOW_S))) * int(WINDOW_S * 1e9)
    return [w for start in starts.tolist() if (w := measured.wall((start, start + int(WINDOW_S * 1e9))))]


def _round(child: Child, session: Session, shorter: float) -> dict[str, Any]:
    before = _windows(child, BASE_S / shorter)
    began = session.on()
    _windows(child, FIRST_S / shorter)
    governed = _windows(child, GOVERNED_S / shorter)
    ended = session.off()
    after = _windows(child, BASE_S / shorter)
    return {"base": before + after, "governed": governed, "began": began, "ended": ended}


def ratio_of_means(on: NDArray[np.float64], off: NDArray[np.float64]) -> tuple[float, float, float]:
    """Of windows' means, (n,) and (m,), with a bootstrap interval of 95 % over windows. Means, since steps while CUPTI
    records are slower than those while it does not."""
    rng = np.random.default_rng(11)
    drawn = [rng.choice(on, len(on)).mean() / rng.choice(off, len(off)).mean() for _ in range(2000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(on.mean() / off.mean()), float(low), float(high)


def run(ctx: Context) -> None:
    shorter = FAKE if ctx.fake else 1
    one_s = (2 * BASE_S + FIRST_S + GOVERNED_S) / shorter + 10
    rows = []
    for mode, size in chosen()[:1] if ctx.fake else chosen()[:2]:
        label = f"{mode}, {size}"
        with (
            ctx.trying(label),
            training(ctx, "--mode", mode, "--size", size, armed=True, name=f"{mode}-{size}") as child,
        ):
            child.answer(90)
            more = {"again": "", "max-overhead": str(PERCENT)}
            session = Session(ctx, [child.pid], "uprobes,kernels,api", f"{mode}-{size}", **more)
            try:
                session.prepared(60)
                found = _round(child, session, shorter)
            finally:
                session.kill()
            base, governed = (np.array([np.mean(w) for w in found[name]]) for name in ("base", "governed"))
            ratio, low, high = ratio_of_means(governed, base)
            counters = found["ended"].get("counters") or {}
            share = counters.get("gpu_share_percent", "-")
            rows.append([label, len(base), len(governed), float(base.mean()), ratio, low, high, share,
                         found["ended"].get("cpu_share")])  # fmt: skip
            ctx.save(**{label: found})
            ctx.check(
                f"{label}: within {PERCENT} %",
                bool(ratio <= 1 + PERCENT / 100) if high - low < 0.03 else None,
                f"{ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})",
            )
            ctx.note(f"{label}: {found['ended'].get('states')}"[:900])
        if ctx.left_s() < one_s:
            break
    ctx.table(
        f"everything, at most {PERCENT} %",
        ["program", "windows", "governed", "base ms", "ratio", "low", "high", "GPU share %", "Argus CPU"],
        rows,
    )
