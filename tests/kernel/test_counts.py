"""What Argus counts is what the program did, to the call: programs with a prime number of calls."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from argus.capture.attachment import Attachment
from argus.capture.probes import Probes
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model.records import LOSS_COUNTERS, Counter
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.kernel.conftest import wait_for_cuda

pytestmark = [pytest.mark.kernel, pytest.mark.core]

LAUNCHES = 1009
COLLECTIVES = 211


def trace_exact(
    store_url: str, go: Path, program: str | None, launches: int, collectives: int, **options: object
) -> Tracer:
    """Traces three ranks that make so many launches and collectives, from before the first to after the last."""
    from run import BUILD, Job

    with Job(
        ranks=3,
        args=["--exact", str(launches), str(collectives), "--go", str(go), "--hold", "1"],
        program=BUILD / program if program else None,
    ) as job:
        wait_for_cuda(job.pids)
        # So large a budget that nothing is thinned, however long a busy machine makes a hit.
        given = Options(pids=tuple(job.pids), max_overhead=1e6, **options)  # type: ignore[arg-type]
        tracer = Tracer(open_store(store_url), given)
        tracer.start()
        try:
            go.touch()
            deadline = time.monotonic() + 60
            while not tracer.done() and time.monotonic() < deadline:
                tracer.poll()
                time.sleep(0.02)
        finally:
            tracer.lost_at_end = tracer.stop()  # type: ignore[attr-defined]
        assert job.wait(10) == [0, 0, 0]
    return tracer


@pytest.mark.parametrize("program", ["fake_train", "fake_train_static"])
@pytest.mark.parametrize("launch_durations", [False, True])
def test_every_call_is_stored_once(store_url: str, tmp_path: Path, program: str, launch_durations: bool) -> None:
    tracer = trace_exact(store_url, tmp_path / "go", program, LAUNCHES, COLLECTIVES, launch_durations=launch_durations)
    assert (tracer.lost_at_end, tracer.store_error) == ({}, "")  # type: ignore[attr-defined]
    with open_store(store_url) as store:
        kernels = query_columns(
            store,
            "SELECT rank, countIf(call = 'cudaLaunchKernel') AS runtime, countIf(call LIKE 'cuLaunch%') AS driver, "
            "countIf(in_nccl) AS nccl FROM launches WHERE kind = 'kernel' GROUP BY rank ORDER BY rank",
        )
        reduces = query_columns(
            store,
            "SELECT rank, count() AS n, uniqExact(seq) AS numbers, max(seq) AS last FROM collectives "
            "WHERE op = 'AllReduce' GROUP BY rank ORDER BY rank",
        )
    assert kernels["rank"].tolist() == [0, 1, 2]
    assert kernels["runtime"].tolist() == [LAUNCHES] * 3
    # each all-reduce launches its kernel, through the runtime; the driver calls inside are not counted again
    assert kernels["nccl"].tolist() == [COLLECTIVES] * 3
    assert kernels["driver"].tolist() == [0, 0, 0]
    assert reduces["n"].tolist() == [COLLECTIVES] * 3
    assert reduces["numbers"].tolist() == [COLLECTIVES] * 3
    assert reduces["last"].tolist() == [COLLECTIVES - 1] * 3


def test_what_a_full_ring_drops_is_counted_to_the_call(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of 64 KiB that is read once a second must overflow; stored and dropped add up."""
    launches = 20_011
    from run import Job

    go = tmp_path / "go"
    with Job(ranks=1, args=["--exact", str(launches), "0", "--go", str(go), "--hold", "1"]) as job:
        wait_for_cuda(job.pids)
        options = Options(pids=tuple(job.pids), launch_ring_bytes=1 << 16, max_overhead=1e6)
        tracer = Tracer(open_store(store_url), options)
        tracer.start()
        try:
            go.touch()
            while not tracer.done():
                time.sleep(1)
                tracer.poll()
        finally:
            kernel = tracer.session.probes.counters() if tracer.session.has_probes else {}
            lost = tracer.stop()
    dropped = kernel[Counter.LAUNCHES_DROPPED]
    assert dropped > 0
    refused = lost.pop("records_over_budget", 0)  # so fast that it is above its share of a ring that nobody reads
    assert lost == {"launches_dropped": dropped}
    assert Counter.LAUNCHES_DROPPED in LOSS_COUNTERS
    with open_store(store_url) as store:
        stored = query_columns(store, "SELECT count() AS n FROM launches")["n"][0]
        reported = query_columns(store, "SELECT value, loss FROM coverage FINAL WHERE counter = 'launches_dropped'")
    assert stored + dropped == kernel[Counter.LAUNCHES] + dropped
    assert stored + dropped + refused >= launches
    assert reported["value"].tolist() == [dropped]
    assert reported["loss"].tolist() == [True]


def test_the_time_that_storing_the_rest_takes_is_not_a_silence_of_the_job(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from run import Job

    slow_s = 3.0
    work = Tracer._work

    def slow(self: Tracer, now: float, *, final: bool = False) -> None:
        if final:
            time.sleep(slow_s)
        work(self, now, final=final)

    with Job(ranks=2, args=["--steps", "0"]) as job:
        wait_for_cuda(job.pids)
        # On a busy machine the governor would leave calls out, which is not what this is about.
        tracer = Tracer(open_store(store_url), Options(pids=tuple(job.pids), max_overhead=1e6))
        tracer.start()
        monkeypatch.setattr(Tracer, "_work", slow)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            tracer.poll()
            time.sleep(0.02)
        assert tracer.stop() == {}
    with open_store(store_url) as store:
        called = query_columns(store, "SELECT max(toUnixTimestamp64Nano(ts)) AS ns FROM launches")["ns"][0]
        looked = query_columns(store, "SELECT max(toUnixTimestamp64Nano(ts)) AS ns FROM coverage")["ns"][0]
    # A launch is made every half a millisecond; half of the time that was slept is left to a busy machine.
    assert int(looked) - int(called) < slow_s / 2 * 1e9


def test_calls_made_while_the_probes_go_are_in_no_step(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches lose their probe first, and collectives go on: a step without its launches would look like another."""
    from run import Job

    detach = Probes.detach

    def slowly(self: Probes, attachments: Iterable[Attachment] | None = None) -> None:
        cuda = [each for each in self.attachments if "libcuda" in Path(each.library.path).name]
        if attachments is None and cuda:
            detach(self, cuda)
            time.sleep(0.5)
        detach(self, attachments)

    with Job(ranks=2, args=["--steps", "0"]) as job:
        wait_for_cuda(job.pids)
        tracer = Tracer(open_store(store_url), Options(pids=tuple(job.pids)))
        tracer.start()
        monkeypatch.setattr(Probes, "detach", slowly)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            tracer.poll()
            time.sleep(0.02)
        assert tracer.stop() == {}
    with open_store(store_url) as store:
        last = {
            table: query_columns(
                store,
                f"SELECT max(toUnixTimestamp64Nano(ts)) - any(j.offset) AS ns FROM {table} CROSS JOIN"
                " (SELECT any(mono_offset_ns) AS offset FROM jobs FINAL) AS j",
            )["ns"][0]
            for table in ("launches", "collectives")
        }
        steps = query_columns(store, "SELECT uniqExact(launches, collectives) AS kinds, count() AS n FROM iterations")
        reported = query_columns(store, "SELECT value FROM coverage FINAL WHERE counter = 'calls_after_end'")["value"]
    assert steps["n"][0] > 20
    assert steps["kinds"][0] == 1
    # Both end at one moment, and not half a second apart.
    assert abs(int(last["launches"]) - int(last["collectives"])) < 250_000_000, last
    assert reported[0] > 0
