"""Copies between the host and the GPU that make a rank late."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.cli.main import main
from argus.diagnose.causes.copies import slow_copies
from argus.diagnose.causes.lost_time import _by_cpu, _Peers
from argus.diagnose.read import queries
from argus.store.open import Store
from argus.store.reader import query_columns
from tests.builders.kineto_job import Job, make, right
from tests.stores import new_store

MS, MB = 1e6, 1e6
RANKS, STEPS = 4, 20
NO_ROWS: dict[str, Any] = {name: np.empty(0) for name in ("kind", "rank", "took_ns", "nbytes")}


class Copies:
    """What is stored of the copies of four ranks: rank 2 copies for 9 ms a step, the others for 0.1 ms.

    Attributes:
        kind: Of what takes long.
        exposed_ms: Time in which the GPU of rank 2 does nothing else.
        took_ms: How long rank 2 copies; and ``usual_ms`` each of the others.
        sent_mb: By rank 2 in a step; the others send 4 MB.
        stored: The queries that have rows of single copies.
    """

    def __init__(
        self, kind: str = "memcpy_h2d", exposed_ms: float = 9.0, took_ms: float = 9.0, usual_ms: float = 0.1,
        sent_mb: float = 4.0, stored: tuple[str, ...] = (queries.COPIES, queries.COPY_CALLS),
    ) -> None:  # fmt: skip
        self.kind, self.stored = kind, stored
        self.exposed = np.where(np.arange(RANKS) == 2, exposed_ms, 0.1) * MS
        self.took = np.where(np.arange(RANKS) == 2, took_ms, usual_ms) * MS
        self.nbytes = np.where(np.arange(RANKS) == 2, sent_mb, 4.0) * MB

    def query(self, text: str, params: dict[str, Any]) -> dict[str, Any]:
        if text == queries.COPY_TIME:
            rank, step = np.repeat(np.arange(RANKS), STEPS), np.tile(np.arange(STEPS), RANKS)
            return {"rank": rank, "step": step, "exposed_ns": self.exposed[rank], "copy_ns": self.took[rank]}
        if text not in (queries.COPIES, queries.COPY_CALLS):
            return {name: np.empty(0) for name in ("rank", "step", "phase", "duration_ns")}
        if text not in self.stored:
            return NO_ROWS
        # Few bytes besides, of every rank.
        kinds = np.repeat([self.kind, "memcpy_h2h"], RANKS)
        took = np.concatenate([self.took, np.full(RANKS, 2e3)])
        rows = {
            "kind": kinds,
            "rank": np.tile(np.arange(RANKS), 2),
            "nbytes": np.append(self.nbytes, np.full(RANKS, 4.0)),
        }
        return {**rows, "took_ns": took if text == queries.COPIES else np.full(2 * RANKS, np.nan)}


def test_a_slow_copy_is_no_late_launch() -> None:
    """By its idle GPU alone the rank's CPU would be late."""
    case: Any = SimpleNamespace(query=Copies().query)
    straggler: Any = SimpleNamespace(ranks=(2,), gain_ns=9 * MS, hidden=False)
    peers = _Peers([2], [2], [0, 1, 3], {"first": 0, "last": STEPS - 1, "ranks": [2, 0, 1, 3]}, (0.0, 8.9 * MS))
    calls = {name: np.zeros(RANKS) for name in ("sync_ns", "module_ns", "data_ns", "other_ns")}
    cause, (sql, _) = _by_cpu(case, straggler, 0, peers, {"rank": np.arange(RANKS), **calls})
    assert (cause.kind, cause.phase, sql) == ("link_degradation", "memcpy", queries.COPIES)
    assert cause.text == (
        "its GPU does nothing but copy for 9.00 ms a step, the others for 100 µs: copies from the host "
        "to the GPU of 4.0 MB a step at 444.4 MB/s, theirs of 4.0 MB a step at 40.0 GB/s"
    )


@pytest.mark.parametrize(
    ("copies", "kind", "words"),
    [
        (Copies(sent_mb=360.0), "data_loading", "of 360.0 MB a step at 40.0 GB/s, theirs of 4.0 MB a"),
        (Copies(sent_mb=8.0), "link_degradation", "of 8.0 MB a step at 888.9 MB/s"),
        (Copies("memcpy_d2h"), "link_degradation", "from the GPU to the host"),
        (Copies("memcpy_d2h", sent_mb=360.0), "compute_straggler", "from the GPU to the host"),
        (Copies("memcpy_d2d"), "compute_straggler", "within the GPU's memory"),
        (Copies("memcpy_p2p"), "link_degradation", "from one GPU to another"),
        (Copies("memcpy"), "link_degradation", ": copies of 4.0 MB"),
        (Copies(stored=(queries.COPY_CALLS,)), "link_degradation", "of 4.0 MB a step, theirs of 4.0 MB a step"),
        (Copies(sent_mb=360.0, stored=(queries.COPY_CALLS,)), "data_loading", "of 360.0 MB a step, theirs of 4.0 MB"),
        (Copies(stored=()), "link_degradation", "nothing but copy for 9.00 ms a step"),
    ],
)  # fmt: skip
def test_what_is_copied_decides_what_a_slow_copy_is(copies: Copies, kind: str, words: str) -> None:
    found = slow_copies(copies.query, {}, [2], [0, 1, 3], 9 * MS)
    assert found is not None
    assert (found.cause.kind, found.cause.phase) == (kind, "memcpy")
    assert words in found.cause.text


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param(Copies(exposed_ms=4.0), id="hidden behind kernels"),
        # Others hide them; this one launches its kernels late, and they show.
        pytest.param(Copies(usual_ms=9.0), id="as long as the others'"),
        pytest.param(Copies(exposed_ms=4.0, took_ms=4.0), id="less than half"),
    ],
)
def test_copies_that_are_not_why_a_rank_is_late(copies: Copies) -> None:
    assert slow_copies(copies.query, {}, [2], [0, 1, 3], 9 * MS) is None


def test_copies_that_are_stored_of_some_steps_count_in_those(store: Store) -> None:
    """Of a running job single kernels are stored where something was flagged: more steps of one rank than of others."""
    with store.lease() as client:
        client.command(
            "INSERT INTO iterations (job, run, rank, step, ts, duration_ns)"
            " SELECT 'j', 1, number % 2, intDiv(number, 2) AS s, fromUnixTimestamp64Nano(toInt64(1e18 + s * 1e8)), 9e7"
            " FROM numbers(40)"
        )
        client.command(
            "INSERT INTO kernel_events (job, run, rank, ts, kind, bytes, duration_ns)"
            " SELECT job, run, rank, addNanoseconds(ts, 7), 'memcpy_h2d', 4000000, 1000000 FROM iterations"
            " WHERE rank = 0 OR step % 5 = 0"
        )
    found = query_columns(store, queries.COPIES, {"job": "j", "run": 1, "first": 0, "last": 19, "ranks": [0, 1]})
    assert (found["nbytes"].tolist(), found["took_ns"].tolist()) == ([4e6, 4e6], [1e6, 1e6])


@pytest.mark.thorough
def test_a_recording_with_a_slow_copy_to_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(dp=4, layers=6, fault="copy", much=7.0, victim=2, steps=16)
    make(job, tmp_path / "traces")
    url = new_store(tmp_path)
    assert main(["import", "kineto", str(tmp_path / "traces"), "--job", "j", "--store", url]) == 0
    capsys.readouterr()
    main(["diagnose", "--job", "j", "--store", url, "--no-store", "--format", "json"])
    verdict = json.loads(capsys.readouterr().out)
    assert right(job, verdict) == ""
    (finding,) = verdict["findings"]
    assert (finding["phase"], finding["owner"]) == ("memcpy", "infrastructure")
    assert any("if rank 2 took as long as its peers" in cited["text"] for cited in finding["evidence"])
    assert "pcie.link.width.current" in finding["action"]
