"""Facts of an environment: which are stored, how long, and what the digest depends on."""

from __future__ import annotations

import pytest

from argus.model import environment
from argus.model.environment import bounded, digest, is_stored


@pytest.mark.parametrize(
    ("variable", "stored"),
    [
        ("NCCL_ALGO", True), ("OMP_NUM_THREADS", True), ("LD_PRELOAD", True), ("HOME", False), ("MASTER_ADDR", False),
        ("AWS_SECRET_ACCESS_KEY", False), ("MY_NCCL_ALGO", False),
    ],
)  # fmt: skip
def test_only_settings_of_training_are_stored(variable: str, stored: bool) -> None:
    assert is_stored(variable) is stored


def test_the_digest_leaves_out_what_differs_between_ranks() -> None:
    facts = {"torch.version": "2.9", "env.CUDA_VISIBLE_DEVICES": "0", "numa.cpus": "0-3"}
    assert digest(facts) == digest({**facts, "env.CUDA_VISIBLE_DEVICES": "1", "numa.cpus": "4-7"}) != 0
    assert digest(facts) == digest(dict(reversed(facts.items())))
    assert digest(facts) != digest({**facts, "torch.version": "2.10"})
    assert digest({}) == digest({"host.boot": "x"}) == 0


def test_facts_are_bounded_and_printable() -> None:
    kept = bounded({"a": "x" * 10_000, "b": "one\x1b[31m\ntwo", **{f"n{n:04}": "" for n in range(1000)}})
    assert len(kept) == environment.MOST
    assert kept["a"] == "x" * environment.LONGEST + "…"
    assert kept["b"] == "one\ufffd[31m\ufffdtwo"
