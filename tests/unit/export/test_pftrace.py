"""``argus export perfetto`` as Perfetto's packets, from stores whose content is known."""

from __future__ import annotations

import resource
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.diagnose.read.hosts import align_hosts
from argus.export import pftrace, timeline
from argus.export.packets import LONGEST
from argus.export.perfetto import Moment
from argus.export.pftrace import Written, export_trace, write_trace
from argus.model.errors import ArgusError
from argus.store.open import Store
from argus.store.read.stacks import Selection
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.hosts_job import World, store_world
from tests.builders.parsed_trace import Parsed, Slice, parse
from tests.builders.stack_data import MS, Row, py, stack, store_run, store_stacks
from tests.builders.timeline_job import NCCL, T0, TimelineJob, store_timeline
from tests.unit.export.test_packets import HOSTILE


def exported(
    store: Store, folder: Path, job: str = "made", name: str = "t.pftrace", **chosen: Any
) -> tuple[Parsed, Written]:
    selection = Selection(job, 1, **({"last_ns": 3600 * 10**9} | chosen))
    _, written = export_trace(store, selection, folder / name)
    return parse(folder / name), written


def by_flow(shown: Parsed) -> dict[int, list[Slice]]:
    out: dict[int, list[Slice]] = {}
    for track in shown.tracks.values():
        for one in [*track.slices, *track.instants]:
            for flow in one.flows:
                out.setdefault(flow, []).append(one)
    return out


def test_everything_that_is_stored_is_shown(store: Store, tmp_path: Path) -> None:
    job = TimelineJob(ranks=2, steps=3, slow={1: 2.0}, loading_ns={1: 5 * MS})
    store_timeline(store, job)
    shown, written = exported(store, tmp_path, steps=(0, 2), last_ns=None)
    assert shown.origin_ns == T0 + min(-job.LAUNCH_NS, 0) or shown.origin_ns <= T0
    assert [track.name for track in shown.tracks.values() if track.process is not None] == [
        "rank 0 (node-0, GPU 0, pid 1000)", "rank 1 (node-0, GPU 0, pid 1001)",
    ]  # fmt: skip
    begin, enters, reduced = job.begins()
    steps = shown.of("rank 1", "steps")
    assert [(one.name, one.begin + shown.origin_ns, one.end - one.begin) for one in steps] == [
        (f"step {step}", at, job.length_ns) for step, at in enumerate(begin.tolist())
    ]
    kernels = shown.of("rank 1", "GPU 0 stream 7")
    assert Counter(one.name for one in kernels) == {"gemm": 6, "softmax<float>(int)": 6, NCCL: 3, "adam": 3}
    reduce = [one for one in kernels if one.name == NCCL]
    assert [(one.begin + shown.origin_ns, one.end + shown.origin_ns) for one in reduce] == list(
        zip(enters[:, 1].tolist(), reduced.tolist(), strict=True)
    )
    assert kernels[0].arguments == {"grid": "4x1x1", "block": "128x1x1", "correlation": 1, "issue_latency_us": 50.0}
    assert len(shown.category("phase")) == 2 * 3 * 2
    (call, *_) = shown.category("collective")
    assert call.arguments == {
        "bytes": 4096, "dtype": "bfloat16", "count": 2048, "seq": 0, "comm": "0xc0", "communicator": "0xabcdef",
        "call of it": 0,
    }  # fmt: skip
    (path,) = shown.named("critical path")
    assert [one.name for one in path.slices] == [
        "rank 1: waiting for data", "rank 1: computing", "rank 0: communication", "rank 0: computing",
    ] * 3  # fmt: skip
    assert written.slices == len(shown.slices)
    (about,) = shown.named("about this timeline")[0].instants
    assert about.arguments["note 1"] == "the critical path is from operations of the GPUs, as they were recorded"


def test_all_steps_from_one_on(store: Store, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob())
    shown, written = exported(store, tmp_path, steps=(1, 2**32 - 1), last_ns=None)
    assert {one.name for one in shown.category("step")} == {"step 1", "step 2"}
    assert {one.arguments["step"] for one in shown.category("critical path")} == {1, 2}
    assert written.notes == ("the critical path is from operations of the GPUs, as they were recorded",)


def test_counters_have_units_and_values(store: Store, tmp_path: Path) -> None:
    job = TimelineJob(loading_ns={1: 5 * MS})
    store_timeline(store, job)
    shown, _ = exported(store, tmp_path)
    counters = {
        (shown.tracks[track.parent].name[:6], track.name): (track.unit, [value for _, value in track.values])
        for track in shown.tracks.values()
        if track.values
    }
    share = 100 * 5 * MS / job.length_ns
    assert counters["rank 1", "step time"] == ("ms", [job.length_ns / 1e6] * 3)
    assert counters["rank 1", "GPU 0 busy"] == ("%", [pytest.approx(100 - share)])
    assert counters["rank 1", "GPU 0 idle in step"] == ("%", [pytest.approx(share, rel=1e-5)] * 3)
    assert counters["rank 0", "GPU 0 issue latency, median"] == ("us", [50.0])
    assert counters["rank 0", "CPUs used"] == ("CPUs", [0.5])
    assert counters["node n", "CPUs busy"] == ("%", [25.0])


def test_arrows_lead_from_launches_to_kernels_and_through_all_ranks_of_a_call(store: Store, tmp_path: Path) -> None:
    job = TimelineJob(ranks=4, steps=2)
    store_timeline(store, job)
    shown, written = exported(store, tmp_path)
    flows = by_flow(shown)
    kinds = Counter(tuple(sorted(one.category for one in ends)) for ends in flows.values())
    assert kinds == {("cuda", "kernel"): 4 * 2 * 6, ("collective",) * 4: 2}
    for ends in flows.values():
        if len(ends) == 2:
            call, kernel = sorted(ends, key=lambda one: one.category)
            assert call.arguments["kernel"] == kernel.name
            assert kernel.begin - call.begin == job.LAUNCH_NS
    assert written.arrows == sum(map(len, flows.values()))


def test_a_launch_that_only_cupti_saw_is_a_moment(store: Store, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob(probed=False))
    shown, _ = exported(store, tmp_path)
    flows = [ends for ends in by_flow(shown).values() if len(ends) == 2 and ends[0].category != "collective"]
    assert len(flows) == 2 * 3 * 6
    assert {tuple(sorted(one.category for one in ends)) for ends in flows} == {("kernel", "launch")}


def test_one_rank_has_no_arrows_to_others(store: Store, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob(ranks=1))
    shown, _ = exported(store, tmp_path)
    assert {tuple(sorted(one.category for one in ends)) for ends in by_flow(shown).values()} == {("cuda", "kernel")}
    store_timeline(store, TimelineJob(ranks=3, job="three"))
    shown, written = exported(store, tmp_path, "three", ranks=(1,))
    assert len([track for track in shown.tracks.values() if track.process is not None]) == 1
    assert any("only some were chosen" in note for note in written.notes)


def test_a_job_without_gpu_times(store: Store, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob(gpu=False))
    shown, written = exported(store, tmp_path)
    assert not shown.category("kernel")
    assert not shown.named("critical path")
    assert "there is no critical path: no GPU times of these steps are stored" in written.notes[0]
    assert len(shown.category("cuda")) == 2 * 3 * 6


def test_nothing_leaves_no_file(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ArgusError, match="nothing is stored of that moment"):
        exported(store, tmp_path)
    store_timeline(store, TimelineJob())
    with pytest.raises(ArgusError, match="no step 9 of job made is stored"):
        exported(store, tmp_path, steps=(9, 9), last_ns=None)
    with pytest.raises(ArgusError, match="nothing is stored of that moment"):
        write_trace(store, Moment("made", 1, T0 - 10**12, T0 - 10**11), tmp_path / "t.pftrace")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_leaves_no_half_file(store: Store, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob(steps=20, kernels=50))
    old = tmp_path / "t.pftrace"
    old.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(ArgusError, match="cannot be written: File too large"):
            exported(store, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["t.pftrace"]
    assert old.read_bytes() == b"old"


def test_compressed_is_the_same(store: Store, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob())
    plain, _ = exported(store, tmp_path)
    packed, _ = exported(store, tmp_path, name="t.pftrace.gz")
    assert (tmp_path / "t.pftrace.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert packed == plain


@pytest.mark.thorough
def test_few_rows_are_held_at_once_and_nothing_is_lost(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_timeline(store, TimelineJob(ranks=3, steps=10, kernels=20))
    whole, _ = exported(store, tmp_path)
    most = 0

    def counting(*words: Any, **options: Any) -> Any:
        nonlocal most
        rows = query_columns(*words, **options)
        if "at" in rows:
            most = max(most, len(rows["at"]))
        return rows

    monkeypatch.setattr(timeline, "BATCH", 50)
    monkeypatch.setattr(timeline, "query_columns", counting)
    pieces, _ = exported(store, tmp_path)
    assert 10 < most <= 50
    assert sorted(map(repr, pieces.slices)) == sorted(map(repr, whole.slices))
    assert pieces.restarts == 1


def test_more_than_a_viewer_opens(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_timeline(store, TimelineJob())
    monkeypatch.setattr(pftrace, "MAX_EVENTS", 40)
    with pytest.raises(ArgusError, match="events are more than a viewer opens"):
        exported(store, tmp_path)


def test_names_of_others_are_inert_and_bounded(store: Store, tmp_path: Path) -> None:
    shown_names = tuple(name.encode("utf-8", "replace").decode() for name in HOSTILE if name)
    store_timeline(store, TimelineJob(steps=2, kernels=2 * len(shown_names), names=shown_names, thread=shown_names[1]))
    shown, _ = exported(store, tmp_path)
    assert (tmp_path / "t.pftrace").stat().st_size < 200_000
    for text in shown.texts:
        assert len(text) <= LONGEST
        assert text.isprintable()
    assert "<script>alert(1)</script>" in {one.name for one in shown.category("kernel")}


def test_stacks_across_pieces(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that overlap are one slice, also where one was read after the other."""
    where = stack(py("main", 12), py("step", 40))
    with Writer(store, source="test") as writer:
        store_run(writer, [0], job="made", steps=4)
        rows = [Row(0, where, ms, count=2, last_ms=ms + 15) for ms in range(0, 100, 10)]
        rows += [Row(0, where, 200 + 10 * n, last_ms=205 + 10 * n) for n in range(5)]
        store_stacks(writer, rows, job="made")
        assert writer.flush(), writer.last_error
    monkeypatch.setattr(timeline, "BATCH", 10)
    shown, _ = exported(store, tmp_path)
    stacks = shown.of("rank 0", "stacks of python (1000)")
    assert [(one.end - one.begin) // MS for one in stacks] == [105, 5, 5, 5, 5, 5]
    assert stacks[0].arguments["samples"] == 20
    monkeypatch.setattr(pftrace, "MOST_TOGETHER", 4)
    shown, _ = exported(store, tmp_path)
    assert len(shown.category("stack")) == 3 + 5, "a chain of rows is not kept without end"


@pytest.mark.thorough
def test_hosts_are_on_one_clock_and_say_how_exactly(store: Store, tmp_path: Path) -> None:
    """Host 1 is 7 ms ahead, and was attached to 600 ms later: its steps have other numbers."""
    world = World(per_host=2, hosts=2, steps=40, attach_ms=(0.0, 600.0, 0.0))
    store_world(store, "world", world)
    hosts = align_hosts(partial(query_columns, store), "world", 1)
    assert hosts is not None
    assert abs(int(hosts.on_reference("node-1", np.array([T0]))[0]) - T0 + 7_000_000) < 1_000_000
    assert hosts.off_reference("node-1", int(hosts.on_reference("node-1", np.array([T0]))[0])) == T0
    shown, written = exported(store, tmp_path, "world")
    names = [track.name for track in shown.tracks.values() if track.process is not None]
    assert names[0].startswith("rank 0 (node-0, pid 100")
    assert "clock ±" in names[2]
    assert "clock" not in names[0]
    assert written.notes[0].startswith("times of all hosts are on the clock of node-0, to ")
    of_call = [ends for ends in by_flow(shown).values() if ends[0].category == "collective"]
    assert max(map(len, of_call)) == 4, "arrows go across hosts"
    kernels = {track.parent: {} for track in shown.tracks.values() if track.name == "GPU 0 stream 7"}
    ends = [
        sorted(one.end for one in track.slices) for track in shown.tracks.values() if track.name == "GPU 0 stream 7"
    ]
    assert kernels
    last = [own[-1] for own in ends]
    assert max(last) - min(last) < 2_000_000, "all leave the last call together"
    begun = {rank: {one.name: one.begin for one in shown.of(f"rank {rank} ", "steps")} for rank in (0, 3)}
    common = set(begun[0]) & set(begun[3])
    assert len(common) > 20
    assert all(abs(begun[0][name] - begun[3][name]) < 60_000_000 for name in common), "a step is the same everywhere"
    chosen, _ = exported(store, tmp_path, "world", steps=(30, 31), last_ns=None)
    assert {"step 30", "step 31"} <= {one.name for one in chosen.of("rank 3 ", "steps")}


def test_clocks_that_cannot_be_aligned_are_said(store: Store, tmp_path: Path) -> None:
    store_world(store, "world", World(per_host=1, hosts=2, steps=20))
    hosts = align_hosts(partial(query_columns, store), "world", 1)
    assert hosts is not None
    hosts.clocks["error_ns"][hosts.clocks["host"] == 1] = -1
    moment = timeline.moment_across(store, Selection("world", 1), hosts)
    written = write_trace(store, moment, tmp_path / "t.pftrace", hosts=hosts)
    named = [track.name for track in parse(tmp_path / "t.pftrace").tracks.values() if track.process is not None]
    assert ["clock not aligned" in name for name in named] == [False, True]
    assert written.notes == ("clocks of node-1 could not be aligned: their times are as these hosts had them",)
