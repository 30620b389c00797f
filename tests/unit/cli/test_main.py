"""The command line's frame: help, exit codes, and that no traceback reaches a user."""

from __future__ import annotations

import errno
import re
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest

from argus.cli import main as cli_main
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError


def test_help_lists_every_verb_and_imports_none_of_them() -> None:
    script = (
        "import sys; from argus.cli.main import main; code = main(['--help']); "
        "heavy = {'numpy', 'pyarrow', 'chdb', 'bcc', 'rich', 'clickhouse_connect'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in cli_main.VERBS:
        assert f"  {verb} " in done.stdout


@pytest.mark.parametrize("verb", cli_main.VERBS)
def test_every_verb_explains_itself_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [verb, "--help"] if verb != "store" else ["store", "init", "--help"]
    assert cli_main.main(words) == 0
    output = capsys.readouterr().out
    assert f"argus {verb}" in output.split("Options:")[0].split("\n", 1)[1], "the help shows an example"
    assert max(map(len, output.splitlines())) <= 110


def test_help_for_80_columns_breaks_no_word() -> None:
    def words(command: click.Command, path: str, width: int) -> list[str]:
        settings = {"help_option_names": ["-h", "--help"], "terminal_width": width, "max_content_width": width}
        return command.get_help(click.Context(command, info_name=path, **settings)).split()

    waiting = [("argus", cli_main.cli)]
    while waiting:
        path, command = waiting.pop()
        # What a list of verbs says of each is cut, at a word: "...".
        narrow = {word for word in words(command, path, 80) if not word.endswith("...")}
        broken = narrow - set(words(command, path, 400))
        assert not broken, f"{path} --help"
        if isinstance(command, click.Group):
            context = click.Context(command)
            waiting += [
                (f"{path} {name}", command.get_command(context, name)) for name in command.list_commands(context)
            ]


def failing(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    @click.command()
    def command() -> None:
        raise failure

    monkeypatch.setattr(cli_main._Verbs, "get_command", lambda *_: command)


def test_an_expected_failure_is_a_line_a_hint_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, ArgusError("there is no process 7", "Look again", EXIT_UNAVAILABLE))
    assert cli_main.main(["trace"]) == EXIT_UNAVAILABLE
    assert capsys.readouterr().err == "argus: there is no process 7\n       Look again\n"


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (ZeroDivisionError("division by zero"), 1, "internal error: ZeroDivisionError"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "argus: No space left on device"),
        (KeyboardInterrupt(), 130, ""),
        (click.UsageError("no such option"), 2, "no such option"),
    ],
)
def test_no_failure_shows_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    failure: BaseException,
    code: int,
    words: str,
) -> None:
    monkeypatch.delenv("ARGUS_DEBUG", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    failing(monkeypatch, failure)
    assert cli_main.main(["trace"]) == code
    output = capsys.readouterr()
    assert words in output.err
    assert "Traceback" not in output.err + output.out


def test_a_defect_s_traceback_is_in_a_file_whose_path_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    failing(monkeypatch, ZeroDivisionError("division by zero"))
    assert cli_main.main(["trace"]) == 1
    output = capsys.readouterr().err
    (log,) = (tmp_path / "argus").iterdir()
    assert f"The traceback is in {log}\n" in output
    assert "raise failure\n    ZeroDivisionError: division by zero" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_an_interrupted_verb_s_failure_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_main.interrupt, "came", True)
    for failure in (ArgusError("the store is away"), ImportError("half a module"), SystemError()):
        failing(monkeypatch, failure)
        assert cli_main.main(["trace"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words", [["no-such-verb"], ["trace", "--pid", "zero"], ["trace", "--pid", "-1"], ["check", "--no"]]
)
def test_wrong_usage_ends_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["simulate", "--job", " "], "cannot be empty"),
        (["simulate", "--job", "a\nb"], "'a\\\\nb' holds what cannot be printed"),
        (["simulate", "--job", "\x1b[31m"], "holds what cannot be printed"),
        (["run", "--job", "\udcff", "--", "true"], "'\\\\udcff' is not UTF-8"),
        (["diagnose", "--job", "\udcff"], "is not UTF-8"),
        (["stacks", "--job", ""], "cannot be empty"),
    ],
)
def test_names_that_no_job_can_have(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(words) == 2
    assert re.search(why, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize("words", [["-V"], ["--version"]])
def test_the_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(words) == 0
    assert re.fullmatch(r"argus, version [\d.]+\n", capsys.readouterr().out)


@pytest.mark.parametrize("words", [["-h"], ["trace", "-h"], ["store", "rm", "-h"], ["import", "kineto", "-h"]])
def test_help_is_short(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(words) == 0
    assert capsys.readouterr().out.startswith("Usage: argus")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["diagnos"], "argus diagnose"),
        (["diag"], "argus diagnose"),
        (["daignose"], "argus diagnose"),
        (["list"], "argus jobs"),
        (["rm", "llama"], "argus store rm"),
        (["store", "stats"], "argus store status"),
        (["import", "nsight"], ""),
        (["health", "reprot"], "argus health report"),
        (["xyzzy"], ""),
    ],
)
def test_a_mistyped_command_is_answered_with_what_it_may_mean(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(words) == (3 if words[0] == "health" else 2)
    output = capsys.readouterr().err
    assert f"No such command '{words[-1] if words[0] in ('store', 'import', 'health') else words[0]}'" in output
    assert (f"Did you mean '{meant}'?" in output) if meant else ("Did you mean" not in output)


@pytest.mark.parametrize("verb", ["trace", "simulate", "import_trace"])
def test_no_verb_that_records_starts_with_scipy(verb: str) -> None:
    """It takes 0.2 s and 26 MB at least: what needs it imports it when it does."""
    script = (
        f"import sys, argus.cli.{verb}, argus.semantics.groups.clocks, argus.compress.fidelity; "
        "sys.exit(str([name for name in sys.modules if name.startswith('scipy')][:3]) if 'scipy' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
