"""CUPTI's times against CUDA events, the GPU's own timer and CLOCK_MONOTONIC around each launch, for drift too."""

from __future__ import annotations

import time

import numpy as np

from argus.model.units import duration
from scripts.gpu_check.common import (
    Child,
    Context,
    PartFailed,
    Session,
    compile_launcher,
    target_environment,
    traced_kernels,
)

LASTS_S = 30.0
LENGTHS_NS = (100_000, 2_000_000)


def run(ctx: Context) -> None:
    program = compile_launcher(ctx, False)
    lasts_s = min(LASTS_S, max(5.0, ctx.left_s() - 20))
    with Child([program], env=target_environment(armed=True), log=ctx.scratch / "clock-launcher.log") as child:
        child.answer(30)
        session = Session(ctx, [child.pid], "kernels,api", "spins")
        try:
            ctx.save(began=session.start())
            spins: list[list[float]] = []
            until = time.monotonic() + lasts_s
            while time.monotonic() < until:
                for length in LENGTHS_NS:
                    spins += [[length, *spin] for spin in child.ask(f"spin 20 {length}")["spins"]]
                time.sleep(0.3)
            ended = session.stop()
        finally:
            session.kill()
    ctx.save(ended=ended)
    kernels = traced_kernels(session.spool).kernels()
    mask = np.array(["argus_spin" in name for name in kernels.name], bool)
    start, lasted, launch = kernels.start_ns[mask], kernels.duration_ns[mask], kernels.launch_ns[mask]
    if not len(start):
        raise PartFailed("no kernel was timed")
    rows = np.array(spins, np.float64)
    ctx.check("every spin was timed once", len(start) == len(rows), f"{len(start)} of {len(rows)}")
    # Synchronised one by one: the order identifies each.
    place = np.searchsorted(start, rows[:, 1].astype(np.int64))
    known = place < len(start)
    rows, place = rows[known], place[known]
    length, before, launched, after, event, timer = rows.T
    begin, took = start[place].astype(np.float64), lasted[place].astype(np.float64)
    end = begin + took
    ok = (end - after) < 1e9
    facts = {}
    for wanted in LENGTHS_NS:
        of = (length == wanted) & ok
        facts[wanted] = [float(np.median(took[of] / timer[of])), float(np.median(took[of] / event[of])),
                         float(np.median(took[of] - timer[of])), float(np.median(event[of] - took[of]))]  # fmt: skip
    ctx.table(
        "length of a spinning kernel",
        ["spin ns", "CUPTI / GPU timer", "CUPTI / event", "CUPTI - timer, ns", "event - CUPTI, ns"],
        [[wanted, f"{a:.5f}", f"{b:.5f}", c, d] for wanted, (a, b, c, d) in facts.items()],
    )
    worst = facts[LENGTHS_NS[-1]]
    ctx.check("lengths within 1 % of the GPU's timer", abs(worst[0] - 1) < 0.01, f"{worst[0] - 1:+.3%}")
    ctx.check("lengths within 1 % of CUDA events", abs(worst[1] - 1) < 0.01, f"{worst[1] - 1:+.3%}")
    early, late = begin - before, after - end
    share = float(np.mean((early >= 0) & (late >= 0)))
    ctx.table(
        "between CLOCK_MONOTONIC around the launch and the synchronisation, ns",
        ["", "least", "1 %", "median", "99 %", "most"],
        [[name, *map(float, np.quantile(values, [0, 0.01, 0.5, 0.99, 1]))] for name, values in
         (("begin - before the launch", early), ("after the synchronisation - end", late),
          ("begin - after the launch returned", begin - launched))],
    )  # fmt: skip
    ctx.check("begin and end lie between launch and synchronisation", share >= 0.999, f"{share:.3%} of {len(early)}")
    api = launch[place] > 0
    if api.any():
        off = launch[place][api] - before[api]
        ctx.check(
            "the launch by CUPTI lies within the launch by the program",
            bool(np.mean((off >= -1000) & (launch[place][api] <= launched[api] + 1000)) > 0.99),
            f"by CUPTI median {duration(float(np.median(off)))} after",
        )
    # Delays are never shorter than their shortest; a clock that drifts makes one side shorter and the other longer.
    thirds = np.array_split(np.argsort(before), 3)
    lows = [float(np.min(early[part])) for part in thirds]
    highs = [float(np.min(late[part])) for part in thirds]
    seconds = float((before.max() - before.min()) / 1e9) * 2 / 3
    drift = ((lows[2] - lows[0]) - (highs[2] - highs[0])) / 2 / seconds
    ctx.save(spread={"early_min": lows, "late_min": highs, "seconds": seconds})
    ctx.check("clocks drift less than 1 µs a second", abs(drift) < 1000, f"{drift:.0f} ns/s over {seconds:.0f} s")
