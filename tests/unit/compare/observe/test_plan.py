"""What is run and in which order: from the command line's parts and from YAML."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import click
import jsonschema
import pytest

from argus.cli.observe import run
from argus.compare.observe.plan import (
    Arm,
    Plan,
    Readings,
    Server,
    check,
    command_words,
    from_yaml,
    parse_arm,
    schedule,
    to_document,
    to_yaml,
)
from argus.compare.observe.records import CONFIG, schemas
from argus.model.errors import EXIT_USAGE, ArgusError

ARMS = (Arm("off", (("CACHE", "0"),)), Arm("on", (("CACHE", "1"),)), Arm("plain"))


def test_every_block_has_each_arm_once_in_an_order_that_the_seed_gives() -> None:
    plan = Plan(("true",), repeat=20, warmup=2, arms=ARMS, seed=7)
    slots = schedule(plan)
    assert [slot.number for slot in slots] == list(range(1, 67))
    assert [slot.warmup for slot in slots] == [True] * 6 + [False] * 60
    blocks = [tuple(slot.arm.name for slot in slots[at : at + 3]) for at in range(0, 66, 3)]
    assert all(sorted(block) == ["off", "on", "plain"] for block in blocks)
    assert len(Counter(blocks)) > 3, "no order is always the same"
    assert schedule(plan) == slots
    assert schedule(replace(plan, seed=8)) != slots


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("fast=OMP_NUM_THREADS=8", Arm("fast", (("OMP_NUM_THREADS", "8"),))),
        ("both=A=1,B=x=y", Arm("both", (("A", "1"), ("B", "x=y")))),
        ("workers=8", Arm("workers=8", (("workers", "8"),))),
        ("empty=A=", Arm("empty", (("A", ""),))),
        ("plain", Arm("plain")),
        ("MY_PW=hunter2", Arm("MY_PW", (("MY_PW", "hunter2"),))),
        ("a=MY_PW=hunter2", Arm("a", (("MY_PW", "hunter2"),))),
    ],
)
def test_arms(text: str, arm: Arm) -> None:
    assert parse_arm(text) == arm


@pytest.mark.parametrize("text", ["", "=A=1", "a=b=1,c", "no-variable=1"])
def test_what_is_no_arm(text: str) -> None:
    with pytest.raises(ArgusError) as wrong:
        check(Plan(("true",), arms=(parse_arm(text),)))
    assert wrong.value.exit_code == EXIT_USAGE


def test_a_plan_survives_its_file() -> None:
    plan = Plan(
        ("./bench", "--size", "4", "it's"), 5, 1, ARMS, 42, 1.5, 0.03,
        Readings(r"lat=([0-9.]+)", "", "ms", "error: .*", "retry"), Server(("./serve", "-p", "80"), "ready: yes", 5.0),
    )  # fmt: skip
    assert from_yaml(to_yaml(to_document(plan)), "file") == plan
    plain = Plan(("true",))
    assert from_yaml(to_yaml(to_document(plain)), "file") == plain


def test_scalars_are_read_as_they_are_written() -> None:
    text = (
        "command: ./x 'a b'\narms:\n  off: {V: no}\n  on: {V: 0x10, W: 1_000}\nlatency: {pattern: ping}\ntimeout: 5m\n"
    )
    plan = from_yaml(text, "file")
    assert plan.command == ("./x", "a b")
    assert plan.arms == (Arm("off", (("V", "no"),)), Arm("on", (("V", "0x10"), ("W", "1_000"))))
    assert (plan.timeout_s, plan.readings.pattern) == (300, r"\btime=([0-9.]+) (ms)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "holds no settings"),
        ("a: [", "is not YAML in line"),
        ("comand: x\n", "has 'comand', which means nothing"),
        ("latency: {patern: x}\n", "has 'patern'"),
        ("command: x\nrepeat: many\n", "repeat is 'many'"),
        ("command: x\nrepeat: 2.5\n", "repeat is '2.5'"),
        ("command: x\nmargin: nan\n", "margin is 'nan'"),
        ("command: x\ntimeout: soon\n", "timeout is 'soon'"),
        ("command: 'a \"b'\n", "cannot be split"),
        ("command: {a: b}\n", "must be text"),
        ("arms: [a]\n", "arms must have settings"),
        ("command: x\nrepeat: 2\nrepeat: 3\n", "has 'repeat' twice, in lines 2 and 3"),
        ("arms:\n  a: {V: 1}\n  a: {V: 2}\n", "has 'a' twice, in lines 2 and 3"),
        ("server:\n  command: x\n  ready_timeout: 0\n", "ready_timeout is '0'"),
        ("schema: other/9\n", "is of schema 'other/9'"),
        ("a: &x 1\nb: *x\n", "aliases are not read"),
        ("command: !!python/object/apply:os.system [x]\nlatency: 3\n", "must have settings"),
        ("a: " + "[" * 3000, "is not YAML"),
        ("#" * (1 << 20) + "\n", "larger than 1 MiB"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ArgusError) as wrong:
        from_yaml(text, "file")
    assert message in wrong.value.message
    assert "\n" not in wrong.value.message
    assert wrong.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ()}, "no command"),
        ({"command": ("a\0",)}, "zero byte"),
        ({"command": ("x", "--token", "***")}, "a secret was left out"),
        ({"command": ("x", '{"password": "***"}')}, "a secret was left out"),
        ({"arms": (Arm("a", (("HF_TOKEN", "***"),)),)}, "a secret was left out"),
        ({"arms": (Arm("HF_TOKEN=hunter2", (("HF_TOKEN", "hunter2"),)),)}, "holds what looks like a secret"),
        ({"repeat": 0}, "repeat is '0', which is not a whole number from 1 to 10,000"),
        ({"seed": -1}, "seed is '-1'"),
        ({"repeat": 9000, "arms": ARMS}, "more than 10,000 runs"),
        ({"timeout_s": 0.0}, "timeout is '0.0'"),
        ({"margin": 0.0}, "margin is '0.0'"),
        ({"server": Server(())}, "server has no command"),
        ({"arms": (Arm("", (("A", "1"),)),)}, "an arm has no name"),
        ({"trace": " "}, "job's name"),
        ({"arms": (Arm("a"), Arm("a"))}, "two arms are called 'a'"),
        ({"arms": (Arm("a\n"),)}, "cannot name an arm"),
        ({"arms": (Arm("a", (("1x", "y"),)),)}, "cannot be a variable"),
        ({"readings": Readings("(", "")}, "not a regular expression"),
        ({"readings": Readings("x", "")}, "has no group"),
        ({"readings": Readings("(x)", "k")}, "only one can be used"),
        ({"readings": Readings(unit="h")}, "is not a unit"),
        ({"readings": Readings(errors="[")}, "pattern of errors"),
    ],
)
def test_plans_that_cannot_be_carried_out(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArgusError) as wrong:
        check(replace(Plan(("true",)), **changes))  # type: ignore[arg-type]
    assert message in wrong.value.message
    assert wrong.value.hint


VALUES = (
    "0", "1", "7", "-1", "-1e99", "2.5", "1e1", "10001", "10_0", "0x10", " 3", "nan", "inf",
    "many", "10ms", "5m", "1 h", "2d", "400d", "0.009", "0.05", "0.5", "100", "101", "0.1", "18446744073709551616",
)  # fmt: skip


@pytest.mark.parametrize("setting", ["repeat", "warmup", "seed", "timeout", "ready_timeout", "margin"])
def test_a_file_and_the_command_line_take_the_same_values(setting: str) -> None:
    """A margin is a share in a file, and in percent on the command line."""
    option = next(one for one in run.params if one.name == setting)
    taken = {}
    for value in VALUES:
        place = "server: {command: x, %s: '%s'}" if setting == "ready_timeout" else "%s: '%s'"
        try:
            plan = check(from_yaml(f"command: x\n{place % (setting, value)}\n", "file"))
        except ArgusError:
            plan = None
        try:
            in_percent = str(float(value) * 100) if setting == "margin" and value not in ("10ms", "many") else value
            given = option.type.convert(in_percent, option, None)
        except (click.BadParameter, ValueError):
            given = None
        assert (plan is None) == (given is None), value
        if plan is not None:
            seconds = plan.server.ready_s if plan.server else plan.timeout_s
            assert given == pytest.approx(seconds if "timeout" in setting else getattr(plan, setting)), value
            taken[value] = to_document(plan)
            jsonschema.validate(taken[value], schemas()[CONFIG])
            assert from_yaml(to_yaml(taken[value]), "file") == plan
    assert taken


def test_secrets_are_not_written() -> None:
    plan = Plan(("x", "--api-key", "abc123"), arms=(Arm("a", (("HF_TOKEN", "hunter2"),)), Arm("b")))
    text = to_yaml(to_document(plan))
    assert "abc123" not in text
    assert "hunter2" not in text


def test_secrets_within_words_are_not_written() -> None:
    words = (
        "--env=A_TOKEN=hunter2", "--export=ALL,B_KEY=hunter2", '{"password": "hunter2"}', "--set=auth.password=hunter2",
        "--header=X-Api-Key: hunter2", "-H", "Authorization: Own hunter2", "--opts=token:hunter2", "--pw", "hunter2",
        "-u", "bob:hunter2", "git+https://hunter2@host/x", "https://h/?code=hunter2", "--steps=5",
    )  # fmt: skip
    arms = (parse_arm("MY_PW=hunter2"), Arm("b", (("MODE", "token:"), ("C_CRED", "hunter2"))))
    plan = Plan(("x", *words), arms=arms, server=Server(("serve", *words)))
    document = to_document(check(plan))
    assert "hunter2" not in to_yaml(document)
    assert document["command"][-1] == "--steps=5"
    assert document["arms"] == {"MY_PW": {"MY_PW": "***"}, "b": {"MODE": "token:", "C_CRED": "***"}}


def test_a_command_is_split_as_a_shell_does() -> None:
    assert command_words("./serve --name 'a b'") == ["./serve", "--name", "a b"]
    with pytest.raises(ArgusError):
        command_words("'")
