"""A run's figures as they are read, and the class that its name is of."""

from __future__ import annotations

import re
from functools import partial
from random import Random

import pytest

from argus.diagnose.read.profile import (
    _IDS,
    class_name,
    class_of,
    from_text,
    read_class,
    read_profile,
    same_work,
    to_text,
)  # fmt: skip
from argus.diagnose.read.queries import RUN_STEPS
from argus.model.errors import ArgusError
from argus.simulate.changes import parse_change
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns
from tests.builders.profiles import profile

START_NS = 1_700_000_000 * 10**9


def test_a_simulated_run(shared: Store) -> None:
    spec = Spec(Mesh(dp=4, tp=2, per_host=4), steps=40, seed=1, kernels=2, changes=[parse_change("host=1:1.1")])
    made = write(shared, "read", spec, run=7, start_ns=START_NS)
    found = read_profile(partial(query_columns, shared), "read", 7)
    assert (found.ranks, found.world_size, found.steps, found.clock, found.ended) == (8, 8, 36, "gpu", True)
    assert found.hosts == ("node0000", "spare0001")
    assert (found.mesh["dp"], found.mesh["tp"]) == (4, 2)
    assert found.step.value == pytest.approx(made.step_ns[4:].mean(), rel=0.01)
    assert sum(mean.value for mean in found.phases.values()) == pytest.approx(found.step.value, rel=0.02)
    assert 0 < found.step.error < 0.01 * found.step.value
    assert found.computed["spare0001"].value == pytest.approx(1.1 * found.computed["node0000"].value, rel=0.02)
    assert found.kernels["gemm_bf16_128x128_tn"].launches == pytest.approx(160, abs=1)
    assert found.transfers["tp AllReduce"].bytes > 0
    assert class_of(found) == read_class(partial(query_columns, shared), "read", 7)
    assert from_text(to_text(found)) == found
    some = query_columns(shared, RUN_STEPS, {"job": "read", "run": 7, "first": 10, "last": 12})
    assert some["step"].tolist() == [10, 11, 12], "no more is read than is compared"


def test_a_short_run_is_refused(shared: Store) -> None:
    write(shared, "short", Spec(Mesh(dp=2), steps=10), run=8, start_ns=START_NS)
    with pytest.raises(ArgusError, match="9 whole steps"):
        read_profile(partial(query_columns, shared), "short", 8)


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("llama-7b", "llama-7b"), ("llama-7b-20261125-1234", "llama-7b"), ("run_1", "run"), ("job-5f3a9c1e77", "job"),
        ("gpt3", "gpt3"), ("-12", "-12"), ("a@3", "a"),
    ],
)  # fmt: skip
def test_ids_at_the_end_are_no_part_of_a_class(job: str, name: str) -> None:
    assert class_name(job) == name


@pytest.mark.parametrize("suffix", ["#2", "#17", "#uid1000", "#uid1000#2", "#uid4294967294", "#3#uid7#2"])
@pytest.mark.parametrize("job", ["llama", "llama-7b", "llama-4711", "run_1", "-12", "a#b", "c#", "d#12345678901", "#2"])
def test_a_name_that_another_job_had_first_makes_no_other_class(job: str, suffix: str) -> None:
    """A trace then puts something behind it (``argus.live.roster``): whoever comes first would choose the class."""
    assert class_name(job + suffix) == class_name(job)


def test_what_a_trace_puts_behind_a_name_is_as_long_as_it_says() -> None:
    def expected(job: str) -> str:
        kept = re.sub(r"(?<=.)(?:#(?:uid)?[0-9]{1,10})+\Z", "", job, flags=re.DOTALL)
        return _IDS.sub("", kept) or kept

    random = Random(5)
    for _ in range(5_000):
        job = "".join(random.choices(["#", "uid", "7", "1000", "a", "-", "12345678901", "\n"], k=random.randint(1, 9)))
        assert class_name(job) == expected(job), job


def test_no_name_is_searched_in_two_ways() -> None:
    """A pattern whose parts overlap would take 2^200 turns."""
    name = "-12345678" * 200 + "x"
    assert class_name(name) == name
    assert class_name("#2" * 5_000 + "x").endswith("x")
    assert class_name("x" + "#2" * 5_000) == "x"


def test_work_is_compared_as_far_as_it_was_observed() -> None:
    assert same_work(profile(work={"launches": 100.0}), profile(work={"launches": 101.0, "bytes": 5.0}))
    assert not same_work(profile(work={"launches": 100.0}), profile(work={"launches": 104.0}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kernels": 3}', "null", to_text(profile()).replace('"step"', '"s"')]
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_text(text)
