"""``argus compare`` and ``argus baseline`` on a store of simulated runs, as a shell calls them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from argus.compare.verdict import schema
from argus.simulate.changes import parse_change
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Noise
from argus.simulate.write import Spec, write
from argus.store.open import open_store
from tests import forked
from tests.stores import new_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Three runs before, three with half of a bandwidth, and one job whose name holds an @. Its engine goes on."""
    url = new_store(tmp_path_factory.mktemp("compare"))
    with open_store(url) as opened:
        for run in range(1, 8):
            job = "old" if run <= 3 else "new" if run <= 6 else "a@b"
            changes = [parse_change("bandwidth=dp:0.5")] if job == "new" else []
            spec = Spec(Mesh(dp=4, per_host=2), noise=Noise(run=0.005), steps=60, seed=run, model=0, changes=changes)
            write(opened, job, spec, run=run, start_ns=(1_700_000_000 + 1000 * run) * 10**9)
        with opened.lease():
            yield url


def argus(store: str, *words: str) -> tuple[int, str, str]:
    done = forked.argus(*words, "--store", store)
    return done.returncode, done.stdout, done.stderr


def test_a_setting_that_halves_a_bandwidth(store: str) -> None:
    code, text, error = argus(store, "compare", "new@last:3", "--against", "old@1,2,3", "--exit-code")
    assert (code, error) == (10, "")
    assert text.startswith("CHANGED, slower")
    assert "1. bandwidth dp AllReduce: +4." in text
    code, text, _ = argus(store, "compare", "new@last:3", "--against", "old@last:3", "--format", "json")
    found = json.loads(text)
    jsonschema.validate(found, schema())
    assert (code, found["causes"][0]["kind"]) == (0, "bandwidth")
    assert [one["run"] for one in found["after"]] == [6, 5, 4]


def test_runs_alike(store: str) -> None:
    code, text, _ = argus(store, "compare", "old@3,2", "--against", "old@1", "--against", "a@b", "--exit-code")
    assert (code, text.split(" ")[0]) == (0, "SAME")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["compare", "old"], 3, "no earlier run of the class of 'old' is a baseline"),
        (["compare", "none", "--against", "old"], 3, "no job 'none' is stored"),
        (["compare", "old@9", "--against", "new"], 3, "job 'old' has no run 9"),
        (["compare", "old@x", "--against", "new"], 2, "'old@x' names no run"),
        (["compare", "old", "--against", "old@last:2"], 2, "run 3 of job 'old' is on both sides"),
        (["compare", "old", "--against", "baseline", "--against", "new"], 2, "--against baseline cannot be combined"),
        (["baseline", "show", "old"], 3, "run 3 of job 'old' is not a baseline"),
        (["baseline", "rm", "old@1"], 3, "run 1 of job 'old' is not a baseline"),
    ],
)
def test_what_cannot_be_compared(store: str, words: list[str], code: int, message: str) -> None:
    done, _, error = argus(store, *words)
    assert done == code
    assert message in error
    assert "Traceback" not in error


def test_baselines_by_hand_and_by_themselves(store: str, tmp_path: Path) -> None:
    assert argus(store, "baseline", "list")[1] == "no run is a baseline\n"
    assert argus(store, "baseline", "set", "old@1,2")[0] == 0
    code, text, _ = argus(store, "diagnose", "--job", "old")
    assert (code, "2 earlier healthy runs" in text) == (0, True)
    rows = json.loads(argus(store, "baseline", "list", "--format", "json")[1])["baselines"]
    assert [(one["run"], one["source"]) for one in rows] == [(1, "set"), (2, "set"), (3, "healthy")]
    assert json.loads(argus(store, "baseline", "show", "old@3", "--format", "json")[1])["run"] == 3
    code, text, _ = argus(store, "compare", "old@3", "--against", "baseline")
    assert (code, "old@2,1" in text) == (0, True)
    assert argus(store, "baseline", "rm", "old@3")[0] == 0
    argus(store, "diagnose", "--job", "old")
    assert "old@3" not in argus(store, "baseline", "list")[1], "what was taken out stays out"
