"""``argus simulate``: the mesh, the schedule and the steps against what is worked out by hand, and what a store and a
diagnosis make of the rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.cli.main import main
from argus.diagnose.read import queries
from argus.diagnose.read.peers import between_stages
from argus.diagnose.read.query import across
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import FINDING_KINDS
from argus.model.errors import ArgusError
from argus.semantics.groups.schedule import BACKWARD, FORWARD, order_of, schedule
from argus.simulate.engine import PHASES
from argus.simulate.faults import FAULTS, parse
from argus.simulate.kernels import Kernels
from argus.simulate.mesh import Mesh
from argus.simulate.noise import QUIET, Noise
from argus.simulate.program import Program
from argus.simulate.rows import Rows
from argus.simulate.write import Made, Spec, truth, write
from argus.store.open import Store
from argus.store.reader import query_columns

MS = 1e6
BARE = Program(
    micro_batches=8, forward_ms=10, tp_ms=0, ep_ms=0, p2p_ms=0, grad_ms=0, optimizer_ms=0, data_ms=0, launch_us=0.001
)
"""Computation and nothing else."""
BUSY = Program(micro_batches=4)
SMALL = Mesh(dp=2, tp=2, pp=2)


def step_ms(spec: Spec, *, healthy: bool = False) -> NDArray[np.float64]:
    """Each step's time, the median over ranks."""
    steps = spec.play(healthy=healthy)
    return np.array([np.median(step.cpu_end - step.cpu_begin) for step in steps if not step.spent]) / MS


def test_ranks_are_numbered_as_megatron_does() -> None:
    mesh = Mesh(dp=4, tp=2, pp=3, ep=2)
    assert mesh.size == 24
    assert mesh.groups["tp"][:2].tolist() == [[0, 1], [2, 3]]
    assert mesh.groups["dp"][:2].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh.groups["pp"][0].tolist() == [0, 8, 16]
    assert mesh.groups["ep"][:3].tolist() == [[0, 2], [1, 3], [4, 6]]
    assert mesh.groups["world"].shape == (1, 24)
    assert mesh.place(13) == (1, 2, 1)
    assert "world" not in Mesh(dp=8).groups


@pytest.mark.parametrize(
    "wrong", [{"dp": 3, "ep": 2}, {"vpp": 2}, {"dp": 0}, {"per_host": 0}], ids=["ep", "vpp", "dp", "host"]
)
def test_a_mesh_that_does_not_fit_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ArgusError):
        Mesh(**wrong)


def test_one_forward_one_backward() -> None:
    f, b = FORWARD, BACKWARD
    assert [(kind, batch) for kind, _, batch in order_of(0, 3, 1, 4)] == [
        (f, 0), (f, 1), (f, 2), (b, 0), (f, 3), (b, 1), (b, 2), (b, 3)
    ]  # fmt: skip
    assert [(kind, batch) for kind, _, batch in order_of(2, 3, 1, 2)] == [(f, 0), (b, 0), (f, 1), (b, 1)]


def test_interleaved_order_is_megatrons() -> None:
    # Narayanan et al., SC '21, figure 4: stage 0 of 4 with 2 chunks does chunk 0 of 4 micro-batches, then chunk 1.
    order = order_of(0, 4, 2, 8)
    assert order[:8] == [(FORWARD, 0, n) for n in range(4)] + [(FORWARD, 1, n) for n in range(4)]
    assert len(order) == len(set(order)) == 32
    assert next(chunk for kind, chunk, _ in order if kind == BACKWARD) == 1
    with pytest.raises(ArgusError):
        order_of(0, 4, 2, 6)


def test_a_schedule_computes_what_is_needed_first() -> None:
    for mesh in (Mesh(pp=4), Mesh(pp=4, vpp=2)):
        done: set[tuple[int, int]] = set()
        for op in schedule(mesh.pp, mesh.vpp, 8):
            assert op.needs is None or op.needs in done
            done.add((op.stage, op.number))
        assert len(done) == 4 * 8 * 2 * mesh.vpp


@pytest.mark.parametrize(("pp", "batches"), [(1, 3), (2, 4), (4, 8), (4, 2)])
def test_a_pipeline_takes_as_long_as_by_hand(pp: int, batches: int) -> None:
    program = Program(**{**BARE.__dict__, "micro_batches": batches})
    took = step_ms(Spec(Mesh(pp=pp), program, QUIET, steps=4))
    # What is left: waits of the CPU, the copy of the batch, the norm.
    assert took == pytest.approx((batches + pp - 1) * 30, abs=0.3)


@pytest.mark.parametrize("vpp", [2, 4])
def test_an_interleaved_pipeline_has_a_bubble_so_many_times_smaller(vpp: int) -> None:
    took = step_ms(Spec(Mesh(pp=4, vpp=vpp), BARE, QUIET, steps=3))
    assert took == pytest.approx(8 * 30 * (1 + 3 / (vpp * 8)), abs=0.3)


def test_transfers_between_stages_are_waited_for() -> None:
    slow = Program(**{**BARE.__dict__, "p2p_ms": 2})
    # Forward to the last stage and back to the first: 2 (pp - 1) transfers lie on the way at least.
    assert step_ms(Spec(Mesh(pp=4), slow, QUIET, steps=2)).min() >= 11 * 30 + 6 * 2


def test_a_cpu_runs_ahead_of_its_gpu_and_waits_where_the_program_does() -> None:
    for step in Spec(Mesh(dp=2), Program(optimizer_ms=0), QUIET, steps=3).play():
        first_bucket = step.calls[0][0].at
        assert step.calls[0][0].call.op == "AllReduce"
        # Kernel 1,980 of 3,000 is launched when number 956 has ended: in the forward pass of 12 ms.
        begun = step.launches["kernel", "first"][0][0]
        assert (first_bucket - begun) / MS == pytest.approx(12 * 0.956, abs=0.1)
        waited = step.launches["sync", ""]
        assert (waited[0] + waited[1] >= step.gpu_begin).all()


def test_tensor_parallel_peers_wait_in_communication() -> None:
    program = Program(micro_batches=4, optimizer_ms=0)
    spec = Spec(SMALL, program, QUIET, [parse("compute_straggler:ranks=0")], steps=2)
    steps = list(spec.play())
    forward, _, _, reduce, *_ = steps[-1].phases
    assert forward[0, 0, 0] == pytest.approx(2 * forward[0, 0, 1])
    assert reduce[0, 0, 1] - reduce[0, 0, 0] == pytest.approx(3 * (forward[0, 0, 1]), rel=0.01)


@pytest.mark.parametrize("mesh", [SMALL, Mesh(dp=4, ep=2), Mesh(pp=2, dp=2, vpp=2)], ids=["3d", "experts", "vpp"])
def test_phases_add_up_to_the_step(mesh: Mesh) -> None:
    spec = Spec(mesh, Program(micro_batches=4), Noise(spike=0.1), steps=6)
    rows = Rows(mesh, spec.program, 10**18)
    tables = dict(rows.steps(list(spec.play())))
    steps, phases = tables["gpu_steps"], tables["gpu_phases"]
    sums = np.zeros((6, mesh.size), np.int64)
    np.add.at(sums, (phases["step"], phases["rank"]), phases["duration_ns"])
    assert (sums == steps["duration_ns"].reshape(6, -1)).all()
    assert (phases["duration_ns"] > 0).all()
    assert (steps["idle_ns"] + steps["busy_ns"] == steps["duration_ns"]).all()
    begin = tables["iterations"]["ts"].reshape(6, -1)
    assert (begin[1:] == (begin + tables["iterations"]["duration_ns"].reshape(6, -1))[:-1]).all()


def test_the_same_seed_is_the_same_job() -> None:
    def tables(seed: int) -> dict[str, Any]:
        spec = Spec(SMALL, Program(micro_batches=4), faults=[parse("jitter")], steps=5, seed=seed)
        return dict(Rows(SMALL, spec.program, 10**18).steps(list(spec.play())))

    once, again, other = tables(3), tables(3), tables(4)
    for name, columns in once.items():
        assert all(str(columns[key]) == str(again[name][key]) for key in columns), name
    assert (once["iterations"]["ts"] == again["iterations"]["ts"]).all()
    assert (once["collectives"]["ts"] == again["collectives"]["ts"]).all()
    assert (once["iterations"]["ts"] != other["iterations"]["ts"]).any()


def test_every_kind_of_a_verdict_can_be_simulated() -> None:
    assert set(FAULTS) == set(FINDING_KINDS)


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "hang"])
def test_every_fault_costs_time_and_a_louder_dose_more(kind: str) -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, per_host=4)
    specs = [
        Spec(mesh, Program(micro_batches=4), faults=[parse(f"{kind}:{dose}")], steps=24, seed=1)
        for dose in ("masked", "quiet", "loud")
    ]
    usual = step_ms(specs[0], healthy=True).mean()
    cost = [float(step_ms(spec).mean() / usual) for spec in specs]
    if kind == "masked_compute_straggler":
        # The stage has less work, and what is slow there stays in the pipeline's bubbles.
        assert all(abs(one - 1) < 0.03 for one in cost)
        return
    assert cost[0] <= cost[1] < cost[2]
    assert cost[0] > 0.99
    assert cost[2] > 1.1


def test_faults_begin_end_and_grow_when_set() -> None:
    fault = parse("compute_straggler:loud:ranks=0,2-3:from=4:steps=6:ramp=2")
    assert fault.ranks == (0, 2, 3)
    assert [fault.level(step) for step in (3, 4, 5, 9, 10)] == [0, 0.5, 1, 1, 0]
    took = step_ms(Spec(Mesh(dp=4), Program(), QUIET, [fault], steps=16))
    assert took[3] == pytest.approx(took[0], rel=0.01)
    assert took[7] > 1.8 * took[0]
    assert took[12] == pytest.approx(took[0], rel=0.01)


def test_half_a_data_parallel_group_may_be_slow() -> None:
    spec = Spec(Mesh(dp=8, tp=2), faults=[parse("compute_straggler:quiet:half")])
    (fault,) = spec.faults
    assert len(fault.ranks) == 8
    assert len({rank // 2 for rank in fault.ranks}) == 4


@pytest.mark.parametrize("shape", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 3, "tp": 2}])
def test_a_slow_link_of_a_ring_is_in_no_record(shape: dict[str, int]) -> None:
    """The ranks that the truth calls alike are just those with which the job would have been the same."""
    mesh = Mesh(**shape)

    def played(rank: int) -> list[Any]:
        step = list(Spec(mesh, BUSY, faults=[parse(f"link_degradation:ranks={rank}")], steps=2, seed=5).play())[-1]
        calls = [getattr(made, name) for stage in step.calls for made in stage for name in ("at", "begin", "end")]
        return [step.phases, step.cpu_end, *step.hidden.values(), *calls]

    made = [played(rank) for rank in range(mesh.size)]
    for rank, own in enumerate(made):
        same = [other for other, theirs in enumerate(made) if all(map(np.array_equal, own, theirs))]
        assert list(parse(f"link_degradation:ranks={rank}").alike(mesh)) == same
        assert len(same) == (mesh.dp if mesh.pp == 1 else 1)
    assert parse("jitter:ranks=1").alike(mesh) == (1,)


@pytest.mark.parametrize("wrong", ["slow", "hang:much", "hang:ranks=a", "hang:ranks=9", "stage_imbalance", "hang:9"])
def test_a_fault_that_is_not_understood_is_refused(wrong: str) -> None:
    with pytest.raises(ArgusError):
        Spec(Mesh(dp=8), faults=[parse(wrong)])


def test_a_fault_after_the_last_step_is_refused() -> None:
    with pytest.raises(ArgusError, match="it would begin at step 40, after the last of 40"):
        Spec(Mesh(dp=8), faults=[parse("hang:from=40")], steps=40)
    Spec(Mesh(dp=8), faults=[parse("hang:from=39")], steps=40)


def test_a_hang_ends_the_calls_of_its_rank() -> None:
    spec = Spec(Mesh(dp=4), Program(), faults=[parse("hang:ranks=2:from=3")], steps=9)
    steps = list(spec.play())
    assert [step.spent for step in steps] == [False, False, False, True]
    tables = dict(Rows(spec.mesh, spec.program, 10**18).steps(steps))
    calls = tables["collectives"]
    assert len(tables["iterations"]["step"]) == 12
    assert [int((calls["rank"] == rank).sum()) for rank in range(4)] == [12, 12, 9, 12]


def stored(store: Store, job: str, spec: Spec, run: int) -> tuple[Made, dict[str, Any]]:
    made = write(store, job, spec, run=run, start_ns=1_700_000_000 * 10**9)
    return made, truth(spec, job, made)


def test_a_slow_gpu_is_diagnosed(shared: Store) -> None:
    spec = Spec(Mesh(dp=8), faults=[parse("compute_straggler:ranks=3:from=20")], steps=60)
    made, known = stored(shared, "slow", spec, 1)
    assert made.rows["iterations"] == made.rows["gpu_steps"] == 480
    assert known["faults"][0]["slowdown"] == pytest.approx(1.85, abs=0.1)
    assert known["slowdown"] == pytest.approx(1.57, abs=0.1)
    verdict = diagnose_store(shared, "slow", 1)
    assert verdict["status"] == "degraded"
    finding = verdict["findings"][0]
    assert finding["ranks"] == [3]
    assert abs(finding["steps"][0] - 20) <= 1


def test_a_healthy_job_is_healthy(shared: Store) -> None:
    _, known = stored(shared, "fine", Spec(Mesh(dp=8, per_host=4), steps=60), 2)
    assert known["faults"] == []
    assert known["slowdown"] == 1.0
    assert diagnose_store(shared, "fine", 2)["status"] == "healthy"
    # Its two hosts have clocks of their own; what the diagnosis finds is what was put in.
    found = query_columns(
        shared, "SELECT host, toUnixTimestamp64Nano(at) AS at, offset_ns, error_ns FROM clocks WHERE job = 'fine'", {}
    )
    rows = Spec(Mesh(dp=8, per_host=4)).rows(1_700_000_000 * 10**9)
    apart = int(rows.offset_ns[1] - rows.offset_ns[0])
    own = found["host"] == "node0001"
    assert abs(apart) > MS
    assert (np.abs(found["offset_ns"][own].astype(np.int64) + apart) < found["error_ns"][own] + 20_000).all()
    assert (found["error_ns"] < 0.2 * MS).all()


def test_rows_hang_together_in_the_store(shared: Store) -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, per_host=4)
    spec = Spec(mesh, Program(micro_batches=4), faults=[parse("gc_pause"), parse("jit_stall")], steps=20)
    made, _ = stored(shared, "mesh", spec, 3)
    assert made.rows["gc_pauses"] > 0
    calls = query_columns(
        shared,
        "SELECT comm_group, aligned_seq, op, count() AS ranks, any(nranks) AS nranks FROM collectives_aligned "
        "WHERE job = 'mesh' AND op NOT IN ('Send', 'Recv') GROUP BY comm_group, aligned_seq, op",
        {},
    )
    assert (calls["ranks"] == calls["nranks"]).all()
    p2p = query_columns(
        shared, "SELECT countIf(op = 'Send') AS s, countIf(op = 'Recv') AS r FROM collectives WHERE job = 'mesh'", {}
    )
    assert p2p["s"][0] == p2p["r"][0] > 0
    inside = query_columns(
        shared,
        "SELECT kind, countIf(step IS NULL) AS outside FROM launches_by_step WHERE job = 'mesh' GROUP BY kind",
        {},
    )
    assert set(inside["kind"]) == {"sync", "kernel", "memcpy_h2d", "module"}
    assert not inside["outside"].any()


def test_kernels_take_as_long_as_their_phases(shared: Store) -> None:
    program = Program(kernels=200)
    spec = Spec(Mesh(dp=4), program, faults=[parse("compute_straggler:ranks=2")], steps=24, kernels=3, layout=True)
    made, _ = stored(shared, "kernels", spec, 4)
    assert made.rows["parallel_layout"] == 1
    assert 2 in spec.summarised_ranks()
    times = query_columns(
        shared,
        "SELECT k.rank AS rank, sum(k.spent_ns) AS spent, any(p.spent) AS phases FROM kernel_times AS k INNER JOIN "
        "(SELECT rank, sum(duration_ns) AS spent FROM gpu_phases WHERE job = 'kernels' AND phase IN "
        "('forward', 'backward', 'optimizer') GROUP BY rank) AS p ON k.rank = p.rank "
        "WHERE k.job = 'kernels' GROUP BY rank ORDER BY rank",
        {},
    )
    assert len(times["rank"]) == 3
    assert times["spent"] / times["phases"] == pytest.approx(1.0, abs=0.04)  # spikes come on top


def test_the_command_prints_the_truth(shared: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "truth.json"
    flags = ["--ranks", "8", "--tp", "2", "--steps", "12", "--job", "told", "--store", shared.url]
    assert main(["simulate", *flags, "--fault", "link_degradation:quiet:ranks=5", "--truth", str(file)]) == 0
    out = capsys.readouterr().out
    assert "link_degradation (quiet: 3) of rank 5" in out
    assert ": 8 ranks on 1 host (dp 4, " in out
    known = json.loads(file.read_text())
    assert known["mesh"]["dp"] == 4
    assert known["faults"][0]["hosts"] == ["node0000"]
    assert len(known["step_ns"]) == len(known["ideal_step_ns"]) == 12
    assert main(["simulate", "--ranks", "9", "--tp", "2", "--store", shared.url]) == 2
    assert main(["simulate", "--ranks", "8", "--fault", "nothing", "--store", shared.url]) == 2


HIDDEN = Mesh(dp=2, tp=2, pp=2, per_host=8)
"""All of the ways in which ranks wait for one another, on one host."""
NAMED = [
    ("a straggler that the pipeline hides", Mesh(dp=2, pp=4), "masked_compute_straggler:ranks=5"),
    ("sparse compilations in a pipeline", HIDDEN, "jit_stall:ranks=6"),
    ("half of a group", Mesh(dp=4, tp=2), "compute_straggler:quiet:half"),
    ("a slow GPU in lockstep, in a pipeline", HIDDEN, "compute_straggler:quiet:ranks=6"),
    ("a late batch in a pipeline", HIDDEN, "data_loading:ranks=6"),
    ("a slow CPU in a pipeline", HIDDEN, "kernel_issue_stall:ranks=6"),
    ("a slow link in a pipeline", HIDDEN, "link_degradation:ranks=6"),
    ("a rank that stopped in a pipeline", HIDDEN, "hang:ranks=6"),
    ("a rank that stopped in the first stage", HIDDEN, "hang:ranks=3"),
    ("collections that take a little", HIDDEN, "gc_pause:masked:ranks=6"),
    ("rare compilations that take a little", Mesh(dp=8), "jit_stall:masked:ranks=6:from=12"),
    ("a batch that is late by little", Mesh(dp=8), "data_loading:masked:ranks=6:from=20"),
    ("batches of half of the ranks, late by less", Mesh(dp=8), "data_loading:masked:ranks=4-7:from=19"),
    (
        "a CPU that loses its lead and costs nothing yet",
        Mesh(dp=2, tp=2, pp=4),
        "kernel_issue_stall:masked:ranks=5:from=20",
    ),
    ("all ranks a little slower", Mesh(dp=8), "regression:masked"),
    ("a host whose CPUs are all of a stage's", HIDDEN, "host_contention:quiet:ranks=0-3:from=15"),
    ("too few micro-batches", HIDDEN, "pipeline_bubble:masked"),
    ("sequences that differ a little in a pipeline", HIDDEN, "sequence_imbalance:masked"),
]


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize(("mesh", "fault"), [case[1:] for case in NAMED], ids=[case[0] for case in NAMED])
def test_who_is_behind_it_is_named(shared: Store, request: pytest.FixtureRequest, mesh: Mesh, fault: str) -> None:
    """Where others come late as well, or nobody does: the kind and the rank of the truth."""
    number = 100 + [case[2] for case in NAMED].index(fault)
    batches = 2 * mesh.pp if mesh.pp > 1 else 1
    spec = Spec(mesh, Program(micro_batches=batches), faults=[parse(fault)], steps=60, skewed=False)
    _, known = stored(shared, f"named-{number}", spec, number)
    verdict = diagnose_store(shared, f"named-{number}", number)
    (expected,) = known["faults"]
    assert verdict["findings"], verdict["reason"]
    first = verdict["findings"][0]
    assert (first["kind"], first["ranks"]) == (expected["kind"], expected["ranks"] if first["ranks"] else [])
    assert first["ranks"] or expected["kind"] == "regression"


@pytest.mark.thorough
def test_all_ranks_of_a_host_that_wait_for_a_cpu_are_named(shared: Store) -> None:
    """One of the four comes last too seldom to be detected by that, and the others not for as long as all of them."""
    fault = parse("host_contention:masked:ranks=4-7:from=14")
    stored(shared, "a busy host", Spec(Mesh(dp=8, per_host=4), faults=[fault], steps=60, seed=2016), 1)
    (finding,) = diagnose_store(shared, "a busy host", 1)["findings"]
    assert (finding["kind"], finding["ranks"], finding["steps"]) == ("host_contention", [4, 5, 6, 7], [14, 59])
    reported = [evidence["text"] for evidence in finding["evidence"]]
    assert any(text.startswith("ranks 4, 6, 7 came last") for text in reported)
    assert "rank 5 on the same hosts waits for a CPU as long" in reported
    assert "ranks 4, 5, 6, 7" in finding["action"]


@pytest.mark.parametrize(
    ("noise", "steps", "is_reported"),
    [
        (Noise(spike=0.03, spike_ms=15), 120, r"6 .* [345]\d% of them"),
        (Noise(spike=0.02, spike_ms=8), 60, r"6 .* \d+% of the \d longest"),
    ],
    ids=["many", "long"],
)
@pytest.mark.thorough(first=1)
def test_stalls_of_one_rank_among_those_that_others_have(
    shared: Store, noise: Noise, steps: int, is_reported: str
) -> None:
    """Every rank is held up now and then: as many long steps or more are others' than those of the one whose stalls
    cost the most; or short ones are."""
    job, faults = f"spikes-{steps}", [parse("jitter:quiet:ranks=6:from=10")]
    stored(shared, job, Spec(Mesh(dp=8), noise=noise, faults=faults, steps=steps), 97)
    (finding,) = diagnose_store(shared, job, 97)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("jitter", [6])
    assert re.search(is_reported, finding["evidence"][1]["text"])


def test_stalls_beside_another_fault(shared: Store) -> None:
    """From the step on in which a GPU gets slow all steps are longer, and stalls stand out from those, too."""
    faults = [parse("compute_straggler:quiet:ranks=3:from=20"), parse("jit_stall:loud:ranks=5")]
    spec = Spec(Mesh(dp=8), faults=faults, steps=60)
    _, known = stored(shared, "beside", spec, 96)
    verdict = diagnose_store(shared, "beside", 96)
    found = {finding["kind"]: finding["ranks"] for finding in verdict["findings"]}
    assert found == {"jit_stall": [5], "compute_straggler": [3]}
    assert verdict["slowdown"] == pytest.approx(
        np.mean(known["step_ns"][20:]) / np.mean(known["ideal_step_ns"][20:]), rel=0.1
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "dp", "run"), [("quiet:ranks=6:from=40", 4, 89), ("loud:ranks=6", 4, 91), ("loud:ranks=2:from=40", 1, 92)]
)
def test_a_slow_gpu_of_a_pipeline_costs_what_steps_show(shared: Store, fault: str, dp: int, run: int) -> None:
    """It has more to do than the busiest of the others by more than that: random waits shrink behind it. What the other
    replicas wait for it shows how much; or, where there is none, how much longer steps are since."""
    faults = [parse(f"compute_straggler:{fault}")]
    spec = Spec(Mesh(dp=dp, tp=2, pp=4), Program(micro_batches=8), faults=faults, steps=80, seed=3)
    _, known = stored(shared, "pipeline", spec, run)
    (finding,) = diagnose_store(shared, "pipeline", run)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("compute_straggler", list(faults[0].ranks))
    lost = np.median(known["step_ns"][40:]) / np.median(known["ideal_step_ns"][40:])
    assert finding["slowdown"] == pytest.approx(lost, rel=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "second", "run"),
    [
        ("compute_straggler:loud:ranks=3:from=10", "compute_straggler:quiet:ranks=5:from=20", 93),
        ("data_loading:loud:ranks=5:from=20", "compute_straggler:quiet:ranks=3:from=10", 94),
    ],
)
def test_two_ranks_that_are_late_in_the_same_steps(shared: Store, first: str, second: str, run: int) -> None:
    """Since when each is late is reported separately, and both together cost no more than there is to be had."""
    faults = [parse(first), parse(second)]
    _, known = stored(shared, f"both-{run}", Spec(Mesh(dp=8), faults=faults, steps=40), run)
    verdict = diagnose_store(shared, f"both-{run}", run)
    found = [(finding["kind"], finding["ranks"], finding["steps"][0]) for finding in verdict["findings"]]
    assert found == [(fault.kind, list(fault.ranks), fault.since) for fault in faults]
    lost = np.median(known["step_ns"][20:]) / np.median(known["ideal_step_ns"][20:])
    assert verdict["slowdown"] == pytest.approx(lost, rel=0.1)


@pytest.mark.thorough
def test_stalls_in_half_of_the_steps_count_once(shared: Store) -> None:
    """In a pipeline a pause makes two steps long: the median of the newest may be one of them."""
    spec = Spec(
        Mesh(dp=2, tp=2, pp=2, per_host=4), Program(micro_batches=4), faults=[parse("gc_pause:quiet")], steps=40,
        seed=7709,
    )  # fmt: skip
    _, known = stored(shared, "half", spec, 95)
    verdict = diagnose_store(shared, "half", 95)
    (finding,) = verdict["findings"]
    assert finding["kind"] == "gc_pause"
    reported = known["slowdown"]
    assert (verdict["slowdown"], finding["slowdown"]) == pytest.approx((reported, reported), rel=0.02)


def test_a_transfer_received_ahead_takes_no_less(shared: Store) -> None:
    """In interleaved schedules, too, the rank is named that slow transfers have in common."""
    faults = [parse("link_degradation:ranks=5:quiet:from=20")]
    spec = Spec(Mesh(dp=4, pp=2, vpp=2), Program(micro_batches=4), faults=faults, steps=60, skewed=False)
    stored(shared, "ahead", spec, 96)
    (finding,) = diagnose_store(shared, "ahead", 96)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("link_degradation", [5])


def test_a_healthy_pipeline_blames_nobody(shared: Store) -> None:
    spec = Spec(HIDDEN, Program(micro_batches=4, variable=True), steps=60, skewed=False)
    stored(shared, "pipeline", spec, 99)
    assert diagnose_store(shared, "pipeline", 99)["status"] == "healthy"
    # Communicators among several stages, which show their order, are left out of who came late.
    params = {"job": "pipeline", "run": 99, "first": 0, "last": 59, "left_out": []}
    between = between_stages(query_columns(shared, queries.GROUPS, params))
    every, inside = (
        set(query_columns(shared, queries.LATENESS, {**params, "left_out": out})["comm_group"].tolist())
        for out in ([], between)
    )
    assert every - inside == every & set(between)
    assert every & set(between)
    assert inside


def test_why_stages_of_one_rank_are_not_compared_is_named(shared: Store) -> None:
    """Every collective links stages. Kernels name a slow GPU all the same."""
    spec = Spec(Mesh(pp=4), Program(micro_batches=8), faults=[parse("compute_straggler:ranks=2:from=20")], steps=60)
    stored(shared, "stages", spec, 98)
    verdict = diagnose_store(shared, "stages", 98)
    assert [(finding["kind"], finding["ranks"]) for finding in verdict["findings"]] == [("compute_straggler", [2])]
    assert verdict["reason"].startswith("nothing is known of who comes late: all collectives that were")


def test_since_when_is_found_in_parts_of_a_large_job(shared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had so many calls that only the newest 20 steps could be read at once."""
    monkeypatch.setattr("argus.diagnose.case.MOST_CALLS", 1)
    spec = Spec(Mesh(dp=8), faults=[parse("compute_straggler:ranks=3:from=43")], steps=160)
    stored(shared, "long", spec, 98)
    (finding,) = diagnose_store(shared, "long", 98)["findings"]
    assert finding["ranks"] == [3]
    assert abs(finding["steps"][0] - 43) <= 1


def test_kernels_are_summed_up_as_they_are_listed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argus.simulate.kernels.SPIKE", 0.0)
    spec = Spec(Mesh(dp=2), steps=3, kernels=2)
    kernels = Kernels(spec.rows(0), spec.program, [0, 1], 0)
    took = dict.fromkeys(kernels.names, 0)
    for step in spec.play():
        for rank, begin_ns, end_ns, group, start_ns, duration_ns in kernels.launches(step):
            assert begin_ns <= start_ns.min()
            assert start_ns.max() < end_ns
            forward = duration_ns[group < 4].sum()
            assert forward == pytest.approx(step.phases[PHASES.index("forward")].ravel()[rank], rel=1e-4)
            for place, name in enumerate(kernels.names):
                took[name] += int(duration_ns[group == place].sum())
        kernels.feed(step)
    stored = dict.fromkeys(kernels.names, 0)
    tables = dict(kernels.tables(final=True))
    names = dict(zip(tables["kernel_groups"]["kernel_id"].tolist(), kernels.names, strict=True))
    for table in tables.keys() & {"kernel_summaries", "kernel_escapes"}:
        for number, total in zip(tables[table]["kernel_id"].tolist(), tables[table]["total_ns"].tolist(), strict=True):
            stored[names[number]] += total
    assert stored == took


@pytest.mark.thorough
@pytest.mark.parametrize(("tp", "fault", "kind", "text"), [
    (1, "compute_straggler:ranks=2:from=0", "compute_straggler", "and a launch takes 2.00 times as long: a slow GPU"),
    (1, "stage_imbalance:from=0", "stage_imbalance", "takes as long as in other stages (1.00x): more work"),
    (2, "compute_straggler:ranks=4,5:from=50", "compute_straggler", "as often as before step 50 (1.00x)"),
    (2, "stage_imbalance:from=50", "stage_imbalance", "takes as long as before step 50 (1.00x): more work"),
])  # fmt: skip
def test_kernels_distinguish_slow_gpus_of_a_whole_stage_from_more_layers(
    shared: Store, tp: int, fault: str, kind: str, text: str
) -> None:
    job, run = f"stages-{fault}", 700 + tp
    _, reported = stored(shared, job, Spec(Mesh(pp=4, tp=tp), faults=[parse(fault)], kernels=8), run)
    (found,) = diagnose_store(shared, job, run)["findings"]
    assert (found["kind"], found["ranks"]) == (kind, reported["faults"][0]["ranks"])
    assert any(text in one["text"] for one in found["evidence"])
    assert found["confidence"] >= 0.79
    assert ("Check the GPU" in found["action"]) == (kind == "compute_straggler")


@pytest.mark.thorough
def test_what_is_begun_before_is_asked_once(shared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour is read while what-if is worked out: the same queries, not others."""
    stored(shared, "once", Spec(Mesh(dp=8), faults=[parse("compute_straggler:ranks=3")], kernels=8), 1)
    asked: list[str] = []

    def noted(shared: Store, text: str, params: dict[str, Any]) -> dict[str, Any]:
        asked.append(text)
        return query_columns(shared, text, params)

    monkeypatch.setattr("argus.diagnose.stored.query_columns", noted)
    (found,) = diagnose_store(shared, "once", 1)["findings"]
    assert any("behav" in one["text"] or "of the time against" in one["text"] for one in found["evidence"])
    for query in (queries.ISSUE, queries.PATTERNS):
        assert [text in (query, across(query, "stored"), across(query, "given")) for text in asked].count(True) == 1
