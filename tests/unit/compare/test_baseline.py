"""Baselines: what is learned, set and taken out, and what a diagnosis makes of them."""

from __future__ import annotations

from functools import partial

import pytest

from argus.cli.main import main
from argus.compare.baseline import list_baselines, remove_baselines, set_baseline, stored_profile
from argus.compare.profile import baseline_side, read_side
from argus.diagnose.learn import learn
from argus.diagnose.read.baseline import read_baseline, read_owner
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict
from argus.model.errors import ArgusError
from argus.simulate.changes import parse_change
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Noise
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer

START_NS = 1_700_000_000 * 10**9
RANK = {
    "pid": [4_000_000], "local_rank": 0, "rank_source": "torchrun", "started": START_NS, "exe": "", "command": "",
    "libraries": [[]], "probes": 1, "state": "exited", "version": 1,
}  # fmt: skip
"""Of a row of ``ranks``, what says nothing of whose it is."""


def run(
    store: Store, job: str, number: int, change: str = "", gpu: str = "H100", ranks: int = 4, kernels: int = 0
) -> Verdict:
    """Stores a run, and diagnoses it. ``kernels``: ranks whose kernels are stored, the same program's in each run."""
    changes = [parse_change(change)] if change else []
    facts = {"torch.version": "2.10" if change else "2.9", "gpu.model": gpu}
    spec = Spec(Mesh(dp=ranks), noise=Noise(run=0.005), steps=60, seed=number, changes=changes, environment=facts,
                kernels=kernels, model=7)  # fmt: skip
    write(store, job, spec, run=number, start_ns=START_NS)
    return diagnose_store(store, job, number, keep=False)


def run_of(store: Store, uid: int, number: int, change: str = "", container: str = "", job: str = "llama") -> Verdict:
    """The same of a user, all of whose runs have one name."""
    run(store, job, number, change)
    with Writer(store, source="test") as writer:
        row = {"job": job, "run": number, "rank": 0, "host": "node-0", "uid": uid, "container": container}
        writer.append("ranks", RANK | row)
    return diagnose_store(store, job, number, keep=False)


def test_what_another_user_runs_under_the_same_name_makes_no_regression(store: Store) -> None:
    for number in (1, 2, 3):
        assert learn(store, run_of(store, 1001, number))
    theirs = run_of(store, 1000, 4, "void=0.08")
    assert (theirs["status"], theirs["findings"]) == ("healthy", [])
    assert "0 earlier healthy runs of this job class are stored (3 more have another user)" in theirs["reason"]
    with pytest.raises(ArgusError, match=r"is a baseline \(3 of 'llama' have another user\)"):
        baseline_side(store, read_side(store, [("llama", 4)]))
    assert run_of(store, 1001, 5, "void=0.08")["status"] == "degraded", "their own it does"
    # What is set by hand is for all.
    for number in (1, 2, 3):
        set_baseline(store, "llama", number)
    assert run_of(store, 1000, 6, "void=0.08")["findings"][0]["kind"] == "regression"


def test_who_takes_a_name_first_takes_no_baseline_away(store: Store) -> None:
    """A process of another user had the name when the job began: a trace stores the job under another one."""
    for number, job in ((1, "llama"), (2, "llama"), (3, "llama#uid1000")):
        assert learn(store, run_of(store, 1000, number, job=job))
    assert {one.name for one in list_baselines(store)} == {"llama"}
    slower = run_of(store, 1000, 4, "void=0.08", job="llama#uid1000")
    assert [finding["kind"] for finding in slower["findings"]] == ["regression"]
    assert "3 healthy runs of this job class (3, 2, 1;" in slower["findings"][0]["evidence"][0]["text"]
    theirs = run_of(store, 65534, 5, "void=0.08")
    assert (theirs["status"], theirs["findings"]) == ("healthy", []), "of another user it says nothing"


def test_another_users_runs_neither_take_out_nor_push_out_a_baseline(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argus.diagnose.read.baseline.NEWEST", 3)
    for number in (1, 2, 3):
        assert learn(store, run_of(store, 1000, number, "void=0.08"))
    for number in (4, 5, 6):
        assert learn(store, run_of(store, 1001, number))
    for number in (7, 8, 9):
        assert learn(store, run_of(store, 1001, number, "void=0.02"))
    assert [one.run for one in list_baselines(store)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    slower = run_of(store, 1000, 10, "void=0.2")
    assert "3 healthy runs of this job class (3, 2, 1;" in slower["findings"][0]["evidence"][0]["text"]


@pytest.mark.thorough
def test_whose_a_run_is(store: Store) -> None:
    """Root of a container is not the node's. Slurm gives its jobs users of the node."""
    query = partial(query_columns, store)
    for number, (uid, container) in enumerate(((0, ""), (0, "pod 7"), (0, "pid:[4]"), (7, "slurm 5"), (-1, "")), 1):
        run_of(store, uid, number, container=container)
    owners = [read_owner(query, "llama", number) for number in range(1, 7)]
    assert owners == [["0"], ["0 in a container"], ["0 in a container"], ["7"], [], []]


def test_healthy_runs_are_learned_and_a_slow_one_is_found(store: Store) -> None:
    for number in (1, 2, 3):
        verdict = run(store, f"llama-{number}", number)
        assert ("are needed to see" in verdict["reason"]) == (number > 1)
        assert learn(store, verdict)
        assert not learn(store, verdict)
    assert [one.run for one in list_baselines(store)] == [1, 2, 3]
    slow = run(store, "llama-4", 4, "void=0.08")
    finding = slow["findings"][0]
    assert (slow["status"], finding["kind"], finding["ranks"]) == ("degraded", "regression", [])
    assert "3 healthy runs" in finding["evidence"][0]["text"]
    assert finding["evidence"][1]["text"] == "in the environment torch.version is 2.10, was 2.9"
    assert any("idle" in one["text"] for one in finding["evidence"])
    assert '"H100"' in next(iter(query_columns(store, "SELECT DISTINCT class FROM baselines")["class"]))
    assert finding["slowdown"] == pytest.approx(1.08, abs=0.03)
    query_columns(store, finding["evidence"][0]["sql"].rstrip(";"))
    assert not learn(store, slow), "a slow run is no reference"
    assert run(store, "llama-5", 5)["status"] == "healthy"
    assert run(store, "other-6", 6, "void=0.08")["status"] == "healthy", "another class has no baseline"


@pytest.mark.thorough
def test_who_has_to_act_follows_from_what_became_longer(store: Store) -> None:
    for number in (1, 2, 3):
        learn(store, run(store, "llama", number, kernels=4))
    owners = {"compute=1.1": "infrastructure", "kernel=flash_bwd_kernel:1.6": "model", "void=0.08": "model",
              "loader=0.1": "data", "bandwidth=dp:0.4": "infrastructure"}  # fmt: skip
    for number, (change, owner) in enumerate(owners.items(), start=4):
        (finding,) = run(store, "llama", number, change, kernels=4)["findings"]
        assert (finding["kind"], finding["owner"]) == ("regression", owner), change
        texts = [one["text"] for one in finding["evidence"] if "the same kernels" in one["text"]]
        assert len(texts) == (change == "compute=1.1")
        assert all("as many launches as in run 3, take 1.1" in text for text in texts)
        for one in finding["evidence"]:
            query_columns(store, one["sql"].rstrip(";"))


@pytest.mark.thorough
def test_a_verdict_that_nobody_reads_to_its_end_is_stored_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, "llama", 1)

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("argus.cli.diagnose.print_verdict", closed)
    main(["diagnose", "--job", "llama", "--store", store.url])
    assert query_columns(store, "SELECT status FROM findings")["status"].tolist() == ["healthy"]
    assert [one.run for one in list_baselines(store)] == [1]


def test_a_run_that_was_taken_out_stays_out(store: Store) -> None:
    verdict = run(store, "llama", 1)
    learn(store, verdict)
    remove_baselines(store, [("llama", 1)])
    assert not list_baselines(store)
    assert not learn(store, verdict)
    with pytest.raises(ArgusError, match="is not a baseline"):
        stored_profile(store, "llama", 1)
    set_baseline(store, "llama", 1)
    assert [one.source for one in list_baselines(store)] == ["set"]
    assert stored_profile(store, "llama", 1).run == 1


@pytest.mark.thorough
def test_a_learned_run_that_is_found_faulty_later_is_taken_out(store: Store) -> None:
    verdict = run(store, "llama", 1)
    learn(store, verdict)
    set_baseline(store, "llama", 1)
    assert not learn(store, {**verdict, "status": "degraded"})
    assert [one.run for one in list_baselines(store)] == [1], "what was set by hand stays"
    learn(store, run(store, "llama", 2))
    assert not learn(store, {**verdict, "run": 2, "status": "inconclusive"})
    assert [one.run for one in list_baselines(store)] == [1, 2]
    assert not learn(store, {**verdict, "run": 2, "status": "degraded"})
    assert [one.run for one in list_baselines(store)] == [1]
    assert not learn(store, {**verdict, "run": 2}), "it does not come back by itself"


@pytest.mark.thorough
def test_a_slow_run_that_was_learned_first_is_taken_out_once_others_show_it(store: Store) -> None:
    """Nothing was there to compare it with. As a baseline it would hide that a later run is as slow."""
    assert learn(store, run(store, "llama", 1, "void=0.08"))
    for number in (2, 3, 4):
        assert learn(store, run(store, "llama", number))
        assert [one.run for one in list_baselines(store)] == [*([1] if number < 4 else []), *range(2, number + 1)]
    assert run(store, "llama", 5, "void=0.08")["findings"][0]["kind"] == "regression"


@pytest.mark.thorough
def test_a_job_that_moved_to_other_gpus_is_not_compared_and_says_so(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU is part of a class. Silence would look like "as fast as ever"."""
    for number in (1, 2, 3):
        learn(store, run(store, "llama", number))
    moved = run(store, "llama", 4, "compute=1.3", gpu="A100")
    few = "0 earlier healthy runs of this job class are stored (3 more have {}), 3 are needed to see whether steps were"
    assert moved["status"] == "healthy"
    assert few.format("another GPU model") in moved["reason"]
    assert few.format("another number of ranks, another mesh") in run(store, "llama", 5, ranks=8)["reason"]
    assert "earlier healthy" not in run(store, "other", 6)["reason"], "of it nothing is stored"
    with pytest.raises(ArgusError, match=r"is a baseline \(3 of 'llama' have another GPU model\)"):
        baseline_side(store, read_side(store, [("llama", 4)]))
    learn(store, moved)
    assert [(one.gpu, one.run) for one in list_baselines(store)] == [("A100", 4), ("H100", 1), ("H100", 2), ("H100", 3)]
    capsys.readouterr()
    assert main(["baseline", "list", "--store", store.url]) == 0
    assert "llama  4 ranks (dp4)  A100  llama@4" in capsys.readouterr().out


@pytest.mark.thorough
def test_long_steps_that_no_baseline_has_are_in_the_reason(store: Store) -> None:
    """Two steps in a hundred take a quarter longer: half a percent of the time, and no finding."""

    def tailed(number: int, spike: float) -> Verdict:
        noise = Noise(run=0.005, spike=spike, spike_ms=12.0)
        spec = Spec(Mesh(dp=4), noise=noise, steps=200, seed=number, environment={"gpu.model": "H100"})
        write(store, "llama", spec, run=number, start_ns=START_NS)
        return diagnose_store(store, "llama", number, keep=False)

    for number in (1, 2, 3, 4, 5):
        assert learn(store, tailed(number, 0.0))
    assert "one step in a hundred" not in tailed(6, 0.0)["reason"]
    slow = tailed(7, 0.01)
    assert slow["status"] == "healthy"
    assert "one step in a hundred takes " in slow["reason"]
    assert "in 5 healthy runs of this job class " in slow["reason"]
    assert not learn(store, slow), "as a baseline it would hide that the next one is as bad"
    profile = stored_profile(store, "llama", 1)
    assert 1 < profile.figures["step_p99"].value / profile.figures["step_median"].value < 1.1


def test_a_run_is_not_compared_with_itself(store: Store) -> None:
    run(store, "llama", 1)
    set_baseline(store, "llama", 1)
    found = read_baseline(partial(query_columns, store), "llama", 1)
    assert found is not None
    assert not found.runs
    with pytest.raises(ArgusError, match="no earlier run of the class"):
        baseline_side(store, read_side(store, [("llama", 1)]))


@pytest.mark.parametrize("lacks", ["status", "ended", "complete"])
@pytest.mark.thorough(first=1)
def test_only_a_whole_healthy_run_is_learned(store: Store, lacks: str) -> None:
    verdict = run(store, "llama", 1)
    if lacks == "status":
        verdict["status"] = "inconclusive"
    elif lacks == "ended":
        verdict["coverage"]["ended"] = False
    else:
        verdict["coverage"]["complete"] = False
    assert not learn(store, verdict)


@pytest.mark.thorough
def test_baselines_are_listed_by_pattern_and_a_job_that_is_not_stored_is_an_error(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for job, number in (("llama-20261125", 1), ("bert", 2)):
        run(store, job, number)
        set_baseline(store, job, number)
    run(store, "bad", 3)

    def listed(*names: str) -> tuple[int, list[str], str]:
        code = main(["baseline", "list", *names, "--store", store.url])
        printed = capsys.readouterr()
        return code, [line.split()[0] for line in printed.out.splitlines()], printed.err

    assert listed() == (0, ["bert", "llama"], "")
    for names in (["ll*"], ["llama"], ["llama-20261126"], ["llama-2026*"], ["nope", "l?ama"]):
        assert listed(*names) == (0, ["llama"], ""), names
    assert listed("ba*")[:2] == (0, ["no"]), "it is stored, and no run of it is a baseline"
    code, lines, error = listed("nope*")
    assert (code, lines) == (3, [])
    assert error.startswith("argus: no job 'nope*' is stored\n       Stored are: bad, ")
    assert listed("nope", "--format", "json")[0] == 3
