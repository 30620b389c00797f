"""Facts of an environment: which are stored, how long, and what the digest depends on."""

from __future__ import annotations

import pytest

from argus.model import environment
from argus.model.environment import bounded, digest, is_stored, is_unread


@pytest.mark.parametrize(
    ("variable", "stored"),
    [
        ("NCCL_ALGO", True), ("OMP_NUM_THREADS", True), ("LD_PRELOAD", True), ("HOME", False), ("MASTER_ADDR", False),
        ("AWS_SECRET_ACCESS_KEY", False), ("MY_NCCL_ALGO", False), ("NCCL_COMM_ID", False), ("NCCL_HOSTID", False),
    ],
)  # fmt: skip
def test_only_settings_of_training_are_stored(variable: str, stored: bool) -> None:
    assert is_stored(variable) is stored


def test_the_digest_leaves_out_what_differs_between_ranks() -> None:
    facts = {"torch.version": "2.9", "env.CUDA_VISIBLE_DEVICES": "0", "numa.cpus": "0-3"}
    assert digest(facts) == digest({**facts, "env.CUDA_VISIBLE_DEVICES": "1", "numa.cpus": "4-7"}) != 0
    assert digest(facts) == digest(dict(reversed(facts.items())))
    assert digest(facts) != digest({**facts, "torch.version": "2.10"})
    assert digest(facts) == digest({**facts, "command": "train.py --name tuesday", "unreadable": "git.commit"})
    assert digest({}) == digest({"host.boot": "x"}) == 0


def test_facts_are_bounded_and_printable() -> None:
    many = {f"env.N{n:04}": "" for n in range(1000)}
    kept = bounded({"a": "x" * 10_000, "b": "one\x1b[31m\ntwo", "torch.version": "2.9", **many})
    assert len(kept) == environment.MOST
    assert kept["a"].startswith("xxx")
    assert len(kept["a"]) == environment.LONGEST
    assert kept["b"] == "one\ufffd[31m\ufffdtwo"
    assert kept["torch.version"] == "2.9", "variables give way first"
    assert kept[environment.UNREADABLE] == "settings", "those that were cut are not taken for not set"
    assert bounded(kept) == kept


def test_long_facts_that_differ_at_their_ends_stay_different() -> None:
    one, other = (bounded({"a": "x" * 10_000 + end})["a"] for end in "yz")
    assert one != other


@pytest.mark.parametrize(
    ("fact", "unreadable", "unread"),
    [
        ("torch.version", "versions", True), ("gpu.cuda", "git.commit,versions", True),
        ("env.NCCL_ALGO", "process", True), ("env.NCCL_ALGO", "settings", True),
        ("cgroup.cpu_max", "cgroup", True), ("cpu.governor", "cpu.governor", True),
        ("cpu.governor", "node", True), ("command", "process", True), ("cpu.governor", "process", False),
        ("torch.version", "node", False), ("torch.version", "git.commit", False), ("torch.version", "", False),
    ],
)  # fmt: skip
def test_what_could_not_be_read_is_not_not_set(fact: str, unreadable: str, unread: bool) -> None:
    assert is_unread(fact, {"unreadable": unreadable} if unreadable else {}) is unread
