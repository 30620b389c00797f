"""A job that makes no steps: what was observed of its silence, what its threads do, and whether it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from argus.diagnose.causes.activity import activities, waits_for
from argus.diagnose.read.observed import FOREVER, Observed, on_cpus_alone, silence
from argus.diagnose.read.queries import ACTIVITY, STEP_SOURCE
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict
from argus.model.stacks import Frame, Stack
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.stack_data import MS, T0, Row, native, py, stack, store_run, store_stacks

S = 1000 * MS
STEP_MS, STEPS = 100, 30
STOPPED = T0 + STEP_MS * STEPS * MS
LOOKED_S = 30


def fake(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for place, name in enumerate(names):
        values = [row[place] for row in rows]
        columns[name] = np.array(values, dtype=object if isinstance(values[0] if values else "", (str, list)) else None)
    return columns


# ---- what was observed


def observed(*rows: tuple[int, str, float, float, float]) -> Observed:
    """Rows (rank, signal, s after the last step, seen, period in s)."""
    names = ("rank", "signal", "ts_ns", "seen", "period_ns", "reason")
    columns = fake(
        [(r, name, int(STOPPED + at * S), seen, int(period * S), "" if seen == 1 else "it costs too much")
         for r, name, at, seen, period in sorted(rows, key=lambda row: (row[1], row[0], row[2]))],
        names,
    )  # fmt: skip
    return Observed(lambda text, params: columns, {})


def silent(
    state: Observed, *, method: str = "marks", launches: float = 0, collectives: float = 0, ranks: Sequence[int] = (0,)
) -> Any:
    def query(text: str, params: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        assert text == STEP_SOURCE
        return fake([(method, launches, collectives)], ("method", "launches", "collectives"))

    return silence(query, {"last": 9}, state, ranks, STOPPED, STOPPED + LOOKED_S * S)


def test_a_store_without_such_rows_was_observed_throughout() -> None:
    nothing = Observed(lambda text, params: {"signal": np.array([], object)}, {})
    assert not nothing
    assert nothing.until("ranges", 0)[0] == FOREVER
    assert (silent(nothing).observed_s, silent(nothing).unobserved) == (LOOKED_S, "")


def test_silence_counts_as_long_as_it_is_observed() -> None:
    there = (0, "ranges", -10, 1, 0)
    assert (silent(observed(there)).observed_s, silent(observed(there)).unobserved) == (LOOKED_S, "")
    gone = silent(observed(there, (0, "ranges", 4, 0, 0)))
    assert gone.observed_s == 4
    assert "ranges are not observed since" in gone.unobserved
    assert "it costs too much" in gone.unobserved
    # The end of the trace is no reason for doubt.
    ended = silent(observed(there, (0, "ranges", LOOKED_S - 1, 0, 0)))
    assert (ended.observed_s, ended.unobserved) == (LOOKED_S - 1, "")
    # What came back is observed from then on only.
    back = silent(observed((0, "ranges", -10, 0, 0), (0, "ranges", 10, 1, 0)))
    assert back.observed_s == 0
    # Where ranges were thinned out, the backward passes that steps are counted by are enough.
    thinned = silent(observed((0, "ranges", -10, 0, 0), (0, "backward", -10, 1, 0)))
    assert (thinned.observed_s, thinned.unobserved) == (LOOKED_S, "")
    # Of another rank, of one that has ended.
    assert silent(observed(there, (1, "ranges", 4, 0, 0))).observed_s == LOOKED_S


def test_windows_count_once_some_have_passed() -> None:
    def windows(period_s: float) -> Any:
        return silent(observed((0, "ranges", -10, 1, 0), (0, "ranges", 2, 0.2, period_s)))

    assert (windows(5).observed_s, windows(5).windows, windows(5).unobserved) == (LOOKED_S, True, "")
    assert windows(10).observed_s == 2
    assert "in windows only" in windows(10).unobserved


def test_every_signal_of_a_step_must_be_observed() -> None:
    """A GPU evaluates without marks of the optimiser: only its launches show that."""
    rows = [(0, "ranges", -10, 1, 0), (0, "launches", -10, 1, 0), (0, "launches", -5, 0, 0)]
    found = silent(observed(*rows), launches=100)
    assert (found.observed_s, "launches are not observed" in found.unobserved) == (LOOKED_S, True)
    assert "launches" in silent(observed(*rows), launches=0).unobserved, "they may have been detached long ago"
    assert silent(observed(*rows[:2]), launches=0).unobserved == ""


# ---- what threads do

MAIN = py("<module>", 90)
SPIN = (MAIN, py("train", 20), native("cuEventQuery+0x40", "/usr/lib/libcuda.so.1"))


def doing(*rows: tuple[bool, str, str, str, float, tuple[Frame, ...]]) -> Any:
    """Rows (main, thread, kind, reason, share of 10 s, frames) of rank 0."""
    names = ("rank", "own", "first_thread", "thread", "kind", "reason", "spent_ns", "kinds", "functions", "files",
             "lines")  # fmt: skip
    table = [
        (0, main, main, thread, kind, reason, share * 10 * S, [f.kind for f in frames], [f.function for f in frames],
         [f.file for f in frames], [f.line for f in frames])
        for main, thread, kind, reason, share, frames in rows
    ]  # fmt: skip
    columns = {name: np.empty(len(table), object) for name in names}
    for place, row in enumerate(table):
        for name, value in zip(names, row, strict=True):
            columns[name][place] = value

    def query(text: str, params: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        assert text == ACTIVITY
        return columns

    return activities(query, {}, [0], STOPPED, STOPPED + 10 * S)[0]


def test_who_computes_goes_on() -> None:
    one = doing((True, "python", "cpu", "", 0.9, (MAIN, py("evaluate", 31), native("sgemm", "/x/libtorch_cpu.so"))))
    assert (one.progresses, round(one.computes, 2), one.moves) == (True, 0.9, False)
    assert "rank 0 computes (90% of a CPU, most in evaluate (app/train.py:31))" in one.text
    # On a machine where others take its CPU.
    queued = (True, "python", "off", "runqueue", 0.5, (MAIN, py("evaluate", 31)))
    late = doing((True, "python", "cpu", "", 0.1, (MAIN, py("evaluate", 31))), queued)
    assert late.progresses
    assert "rank 0 is ready to compute in evaluate (app/train.py:31), but for 50% of the time no CPU" in late.text
    # A thread that does backward passes, and one that the main thread waits for.
    waits = (True, "python", "off", "futex", 1.0, (MAIN, py("wait", 3)))
    assert doing(waits, (False, "pt_autograd_0", "cpu", "", 0.8, (native("sgemm"),))).progresses
    assert doing(waits, (False, "worker", "cpu", "", 0.8, (py("decode", 7),))).progresses


def test_a_cpu_that_spins_in_a_wait_does_not_compute() -> None:
    one = doing((True, "python", "cpu", "", 1.0, SPIN))
    assert (one.progresses, one.spins, one.waits_for) == (False, 1.0, "gpu")
    assert "spins in a wait in train (app/train.py:20)" in one.text
    yields = (MAIN, py("barrier", 5, "/x/torch/distributed/c10d.py"), native("sched_yield", "/usr/lib/libc.so.6"))
    assert not doing((True, "python", "cpu", "", 1.0, yields)).progresses
    # While it waits for others, what its other threads do is no progress of the job.
    helper = (False, "logger", "cpu", "", 0.5, (py("render", 7),))
    assert not doing((True, "python", "cpu", "", 1.0, SPIN), helper).progresses


def test_who_is_now_here_and_now_there_goes_on() -> None:
    places = [(True, "python", "off", "read", 0.25, (MAIN, py("load", line))) for line in range(4)]
    assert doing(*places).moves
    assert "goes on" in doing(*places).text
    doing_little = [(True, "python", "off", "read", 0.05, (MAIN, py("load", 9)))]
    assert not doing((True, "python", "off", "read", 0.95, (MAIN, py("load", 3))), *doing_little).moves


def test_argus_and_watchdogs_do_not_count() -> None:
    sleeps = (True, "python", "off", "futex", 1.0, (MAIN, py("load", 3, "/x/torch/utils/data/dataloader.py")))
    one = doing(sleeps, (False, "argus-cupti", "cpu", "", 1.0, ()), (False, "watchdog", "cpu", "", 0.02, ()))
    assert (one.progresses, one.waits_for) == (False, "data")
    assert "rank 0 waits (futex) in load" in one.text


@pytest.mark.parametrize(
    ("frames", "reason", "wanted"),
    [
        (SPIN, "", "gpu"),
        ((MAIN, py("f", 1)), "driver", "gpu"),
        ((MAIN, py("all_reduce", 1, "/x/torch/distributed/distributed_c10d.py")), "futex", "communication"),
        ((MAIN, native("ncclGroupEnd", "/x/libnccl.so.2")), "futex", "communication"),
        ((MAIN, py("_try_get_data", 1, "/x/torch/utils/data/dataloader.py")), "poll", "data"),
        ((MAIN, py("f", 1)), "disk", "disk"),
        ((MAIN, py("pause", 1)), "sleep", ""),
        ((MAIN, py("run_forever", 1, "/x/asyncio/base_events.py")), "poll", ""),
    ],
)
def test_what_a_thread_waits_for(frames: tuple[Frame, ...], reason: str, wanted: str) -> None:
    assert waits_for(frames, reason) == wanted


# ---- the verdict

IDLE = stack(MAIN, py("pause", 40))
EVALUATES = stack(MAIN, py("evaluate", 31), native("sgemm", "/x/libtorch_cpu.so"))
SPINS = Stack(SPIN, "complete", "leaf")
IN_BARRIER = stack(MAIN, py("barrier", 50, "/x/torch/distributed/distributed_c10d.py"))
LOADS = stack(MAIN, py("_try_get_data", 9, "/x/torch/utils/data/dataloader.py"))


def judged(
    store: Store,
    job: str,
    doing: Mapping[int, tuple[Stack, str]],
    *,
    missing: int | None = None,
    signals: Sequence[tuple[int, str, float, float, float]] = (),
    method: str = "marks",
) -> Verdict:
    """A job that stopped and was traced for 30 s more.

    Args:
        doing: By rank, where its main thread is and what it waits for there (empty: it runs).
        missing: The rank that did not come to the last collective; None: the job makes none.
        signals: As of ``observed``.
    """
    ranks = sorted(doing)
    with Writer(store, source="test") as writer:
        store_run(writer, ranks, job=job)
        every = [(rank, step) for rank in ranks for step in range(STEPS)]
        writer.append("iterations", {
            "job": job, "run": 1, "rank": [rank for rank, _ in every], "step": [step for _, step in every],
            "host": "node-0", "ts": [T0 + step * STEP_MS * MS for _, step in every], "duration_ns": STEP_MS * MS,
            "collectives": int(missing is not None), "launches": 0, "method": method, "confidence": 1.0,
        })  # fmt: skip
        writer.append("coverage", {
            "job": job, "run": 1, "host": "node-0", "counter": ["hits"], "value": np.array([1], np.uint64),
            "loss": False, "ts": [STOPPED + LOOKED_S * S], "version": 1,
        })  # fmt: skip
        if missing is not None:
            writer.append("communicators", {
                "job": job, "run": 1, "rank": ranks, "comm": 5, "comm_group": 77, "comm_rank": ranks,
                "nranks": len(ranks), "seq_offset": 0, "joined_by": "traffic", "error": "", "version": 1,
            })  # fmt: skip
            calls = [(rank, step) for rank in ranks for step in range(STEPS + (rank != missing))]
            writer.append("collectives", {
                "job": job, "run": 1, "rank": [rank for rank, _ in calls], "host": "node-0",
                "pid": [1000 + rank for rank, _ in calls], "tid": 1, "comm": 5, "op": "AllReduce",
                "seq": [step for _, step in calls], "bytes": 4, "count": 1, "dtype": "float32", "redop": "sum",
                "peer": -1, "stream": 1, "ts": [T0 + (step * STEP_MS + 5) * MS for _, step in calls],
                "duration_ns": 1000, "result": 0, "in_group": False,
            })  # fmt: skip
        if signals:
            writer.append("signal_coverage", {
                "job": job, "run": 1, "rank": [row[0] for row in signals], "host": "node-0",
                "signal": [row[1] for row in signals], "ts": [int(STOPPED + row[2] * S) for row in signals],
                "seen": np.array([row[3] for row in signals], np.float32),
                "period_ns": np.array([int(row[4] * S) for row in signals], np.uint64),
                "reason": ["" if row[3] == 1 else "it costs too much" for row in signals], "version": 1,
            })  # fmt: skip
        store_stacks(writer, [
            Row(rank, where, STEP_MS * STEPS + ms, "off" if reason else "cpu", ns=2 * S,
                last_ms=STEP_MS * STEPS + ms + 2000 - (not reason) * 1900, reason=reason)
            for rank, (where, reason) in doing.items() for ms in range(1000, LOOKED_S * 1000, 2000)
        ], job=job)  # fmt: skip
    return diagnose_store(store, job, 1)


def test_a_rank_that_computes_is_not_hung(shared: Store) -> None:
    verdict = judged(shared, "evaluates", {0: (EVALUATES, "")})
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])
    assert "no step was seen for the last 30 s (300 usual steps): rank 0 computes" in verdict["reason"]
    assert "evaluate (app/train.py:31)" in verdict["reason"]
    shorter = diagnose_store(shared, "evaluates", 1, hang_after_s=60)
    assert "(300 usual steps), and no call was made: rank 0 computes" in shorter["reason"]
    others = judged(shared, "one evaluates", {0: (EVALUATES, ""), 1: (IN_BARRIER, "futex")}, missing=0)
    assert others["status"] == "inconclusive"
    assert "others wait for rank 0; rank 0 computes" in others["reason"]


def test_a_job_with_nothing_to_do_is_not_hung(shared: Store) -> None:
    alone = judged(shared, "notebook", {0: (IDLE, "poll")})
    assert alone["status"] == "inconclusive"
    assert "rank 0 waits (poll) in pause (app/train.py:40)" in alone["reason"]
    assert judged(shared, "both pause", {0: (IDLE, "sleep"), 1: (IDLE, "sleep")})["status"] == "inconclusive"


def test_a_rank_that_sleeps_while_others_wait_for_it_is_named(shared: Store) -> None:
    verdict = judged(shared, "sleeps", {0: (IN_BARRIER, "futex"), 1: (IDLE, "sleep")}, missing=1)
    assert verdict["status"] == "hung"
    assert verdict["findings"][0]["ranks"] == [1]
    assert "pause (app/train.py:40)" in verdict["findings"][0]["action"]


def test_a_spinning_wait_is_a_hang(shared: Store) -> None:
    both = judged(shared, "spin", {0: (SPINS, ""), 1: (SPINS, "")})
    assert both["status"] == "hung"
    assert "NCCL" in both["findings"][0]["action"]
    missed = judged(shared, "spins and sleeps", {0: (SPINS, ""), 1: (LOADS, "poll")}, missing=1)
    assert (missed["status"], missed["findings"][0]["ranks"]) == ("hung", [1])
    alone = judged(shared, "alone", {0: (LOADS, "poll")})
    assert (alone["status"], alone["findings"][0]["ranks"]) == ("hung", [0])
    assert "rank 0 on node-0 stays in _try_get_data" in alone["findings"][0]["action"]


def test_no_advice_is_on_gpus_that_a_job_has_not(shared: Store) -> None:
    """PyTorch was probed, and made no call of CUDA."""
    both = {0: (SPINS, ""), 1: (SPINS, "")}
    unknown = judged(shared, "on cpus", both)["findings"][0]["action"]
    with Writer(shared, source="test") as writer:
        writer.append("ranks", {
            "job": "on cpus", "run": 1, "rank": [0, 1], "host": "node-0", "pid": [1000, 1001], "local_rank": [0, 1],
            "rank_source": "torchrun", "started": T0, "exe": "python", "command": "python train.py",
            "libraries": [["libtorch_cpu.so"]] * 2, "probes": 12, "state": "traced", "version": 2,
        })  # fmt: skip
    assert on_cpus_alone(partial(query_columns, shared), {"job": "on cpus", "run": 1})
    assert not on_cpus_alone(partial(query_columns, shared), {"job": "spin", "run": 1}), "nothing is known of it"
    action = diagnose_store(shared, "on cpus", 1)["findings"][0]["action"]
    assert "NCCL" in unknown
    assert not {"NCCL", "GPU", "nvidia-smi"} & set(action.replace("'", " ").split())


def test_silence_of_what_was_not_observed_is_no_hang(shared: Store) -> None:
    there = [(0, "ranges", -10.0, 1.0, 0.0), (1, "ranges", -10.0, 1.0, 0.0)]
    gone = [*there, (0, "ranges", 1.0, 0.0, 0.0)]
    both = {0: (SPINS, ""), 1: (SPINS, "")}
    verdict = judged(shared, "detached", both, signals=gone)
    assert verdict["status"] == "inconclusive"
    assert "ranges are not observed since" in verdict["reason"]
    assert "(it costs too much); rank 0 spins in a wait" in verdict["reason"]
    assert judged(shared, "attached", both, signals=there)["status"] == "hung"
    # Collectives that were observed show a rank that is missing, whatever else was detached.
    seen = [*gone, (0, "collectives", -10.0, 1.0, 0.0), (1, "collectives", -10.0, 1.0, 0.0)]
    held = {0: (IN_BARRIER, "futex"), 1: (IDLE, "sleep")}
    assert judged(shared, "missed", held, missing=1, signals=seen)["status"] == "hung"
    # Of a rank whose collectives were detached nobody knows what it called.
    blind = [*seen, (1, "collectives", -1.0, 0.0, 0.0)]
    assert judged(shared, "blind", held, missing=1, signals=blind)["status"] == "inconclusive"
