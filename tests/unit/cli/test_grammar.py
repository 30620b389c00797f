"""How ranks, steps, processes, spans and times are written: the same for every verb."""

from __future__ import annotations

import click
import pytest

from argus.cli.grammar import (
    LAST_STEP,
    parse_open_steps,
    parse_pids,
    parse_ranks,
    parse_since,
    parse_span,
    parse_steps,
    parse_time,
)
from argus.cli.main import cli, main
from argus.model.errors import EXIT_USAGE, ArgusError

S = 10**9


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("100:200", (100, 200)),
        ("100-200", (100, 200)),
        ("7", (7, 7)),
        ("7:7", (7, 7)),
        ("100:", (100, None)),
        (":200", (None, 200)),
        ("0:", (0, None)),
    ],
)
def test_steps(word: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_open_steps(word) == expected
    first, last = expected
    assert parse_steps(word) == (first or 0, LAST_STEP if last is None else last)


@pytest.mark.parametrize("word", ["", ":", "-", "a", "5:3", "5-3", "-5", "5-", "1:2:3", "1 : 2", "1.5", "9999999999"])
def test_no_steps(word: str) -> None:
    with pytest.raises(ArgusError, match="names no steps") as failure:
        parse_open_steps(word)
    assert failure.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("2s", 2 * S),
        ("2", 2 * S),
        ("2.5", 2_500_000_000),
        ("500ms", S // 2),
        ("5m", 300 * S),
        ("2h", 7200 * S),
        ("1d", 86400 * S),
        ("30 s", 30 * S),
    ],
)
def test_spans(word: str, expected: int) -> None:
    assert parse_span(word) == expected
    assert parse_since(word) == (expected, None)


@pytest.mark.parametrize("word", ["", "0", "0s", "-1", "2x", "s", "1e3", "nan", "inf", "400d", "2s3m"])
def test_no_spans(word: str) -> None:
    with pytest.raises(ArgusError, match="no span of time"):
        parse_span(word)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("1700000000", 1_700_000_000 * S),
        ("1700000000.5", 1_700_000_000 * S + S // 2),
        ("2023-11-14T22:13:20", 1_700_000_000 * S),
        ("2023-11-14T22:13:20Z", 1_700_000_000 * S),
        ("2023-11-14T23:13:20.000000001+01:00", 1_700_000_000 * S + 1),
    ],
)
def test_times(word: str, expected: int) -> None:
    assert parse_time(word) == expected
    assert parse_since(word) == (None, expected)


def test_ranks_and_processes() -> None:
    assert parse_ranks(("1,3-5", "0")) == (0, 1, 3, 4, 5)
    assert parse_ranks(()) == ()
    assert parse_pids(("12,11", "12", "7")) == (12, 11, 7)
    for word in ("", "1-", "a", "3-1", "1,,2"):
        with pytest.raises(ArgusError, match="names no ranks"):
            parse_ranks((word,))
    for word in ("", "0", "-1", "4194305", "1,,2", "train.py"):
        with pytest.raises(ArgusError, match="is no process id"):
            parse_pids((word,))


@pytest.mark.parametrize("verb", ["diagnose", "export", "stacks", "flag"])
def test_verbs_that_read_a_run_share_their_options(verb: str) -> None:
    """The same spellings everywhere, the old ones among them."""
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    spelled = {word for parameter in command.params for word in parameter.opts}
    assert spelled >= {"--job", "--run", "--rank", "--steps", "--step", "--since", "--from", "--last"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["trace", "--pid", "1,x"], "'x' is no process id"),
        (["trace", "4194305"], "is no process id"),
        (["trace", "train.py"], "By name: --name train.py"),
        (["trace", "1", "--duration", "soon"], "'soon' is no span of time"),
        (["trace", "1", "--duration", "0"], "'0' is no span of time"),
        (["trace", "1", "--steps", "100:200"], "cannot begin at a step"),
        (["trace", "--name", " "], "--name is empty"),
        (["diagnose", "--steps", "5:3"], "'5:3' names no steps"),
        (["diagnose", "--since", "10m", "--last", "5m"], "Give one of them"),
        (["diagnose", "--rank", "x"], "'x' names no ranks"),
        (["diagnose", "--interval", "0.1s"], "too short"),
        (["dump", "--name", ""], "--name is empty"),
        (["dump", "x"], "'x' is no process id"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == EXIT_USAGE
    assert why in " ".join(capsys.readouterr().err.split())
