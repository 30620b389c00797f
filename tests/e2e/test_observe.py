"""``argus observe`` as a shell calls it: real commands, short ones. How it is decided, unit tests have."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from argus.compare.observe import execute
from argus.compare.observe.records import schemas
from tests import forked

ARGUS = [sys.executable, "-m", "argus.cli.main", "observe"]
VERDICTS = (0, 10, 12, 13)
LIMIT_S = 240


def argus(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.argus("observe", *words, timeout=LIMIT_S)


def argus_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same, started as a shell does it."""
    return subprocess.run([*ARGUS, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False, **options)


def records(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """metrics.json and run_meta.json, once all documents agree with their schemas."""
    found = {}
    for name, contract in schemas().items():
        text = (folder / name).read_text(encoding="utf-8")
        found[name] = yaml.safe_load(text) if name.endswith("yaml") else json.loads(text)
        jsonschema.validate(found[name], contract)
    return found["metrics.json"], found["run_meta.json"]


def test_a_command_is_repeated_reported_and_exported(tmp_path: Path) -> None:
    ballast = b"x" * 400_000_000  # what started Argus had more memory than the command
    del ballast
    folder = tmp_path / "o"
    script = "from os import environ as e; x = b'x' * 200_000_000\n"
    script += "print('latency=3.5 ms', e['MODE'], e.get('ARGUS_STORE_PASSWORD'))"
    done = argus_process(
        "--repeat", "5", "--warmup", "1", "--arm", "a=MODE=one", "--arm", "b=MODE=two", "--pattern", "latency",
        "--out", str(folder), "--", sys.executable, "-c", script, env={**os.environ, "ARGUS_STORE_PASSWORD": "secret"},
    )  # fmt: skip
    assert done.returncode in VERDICTS, done.stderr
    assert done.stdout.splitlines()[-1].strip() == str(folder / "report.md")
    assert len(done.stderr.splitlines()) == 12
    metrics, meta = records(folder)
    assert (meta["status"], metrics["partial_failure"], len(metrics["runs"])) == ("finished", False, 12)
    for run in metrics["runs"]:
        words = (folder / run["output"]["stdout"]).read_text().split()
        assert words == ["latency=3.5", "ms", {"a": "one", "b": "two"}[run["arm"]], "None"]
        assert run["latency"]["count"] == 1
        figures = run["figures"]
        assert figures["wall_ns"] > figures["user_ns"] / os.cpu_count() > 0  # type: ignore[operator]
        assert figures["peak_memory_bytes"] > 200_000_000
    before = (folder / "report.md").read_text()
    (folder / "report.md").unlink()
    again = argus("report", str(folder), "--format", "json")
    assert again.returncode == done.returncode
    assert json.loads(again.stdout)["decision"] == metrics["decision"]
    assert (folder / "report.md").read_text() == before
    exported = argus("export", str(folder), "--sanitize")
    assert (exported.returncode, exported.stderr) == (0, "")
    with zipfile.ZipFile(tmp_path / "o.sanitized.zip") as archive:
        assert len(archive.namelist()) == 4
        assert not [name for name in archive.namelist() if meta["host"] in archive.read(name).decode()]
    assert argus("export", str(folder), "-o", str(tmp_path / "whole.zip")).returncode == 0
    with zipfile.ZipFile(tmp_path / "whole.zip") as archive:
        assert len(archive.namelist()) == 4 + 24
    refused = argus("--out", str(folder), "--", "true")
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (
        2,
        f"argus: {folder} is the folder of another argus observe",
    )


def test_settings_come_from_a_file_and_options_go_before_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "command: [sh, -c, 'exit $CODE']\nrepeat: 5\narms: {off: {CODE: 0}, on: {CODE: 7}}\nseed: 9\n"
    )
    done = argus("run", "-f", str(tmp_path / "c.yaml"), "--repeat", "2", "--out", str(tmp_path / "o"))
    assert done.returncode == 10, done.stderr
    metrics, _ = records(tmp_path / "o")
    assert sorted((run["arm"], run["exit_code"]) for run in metrics["runs"]) == [("off", 0)] * 2 + [("on", 7)] * 2
    assert metrics["partial_failure"]
    assert "seed: 9" in (tmp_path / "o/resolved_config.yaml").read_text()
    again = argus("run", "-f", str(tmp_path / "o/resolved_config.yaml"), "--out", str(tmp_path / "again"))
    assert [run["arm"] for run in records(tmp_path / "again")[0]["runs"]] == [run["arm"] for run in metrics["runs"]]
    assert again.returncode == 10


def test_how_runs_end_is_recorded(tmp_path: Path) -> None:
    """By its first argument, which an arm's variable gives: well, with a code, by a signal, or not in time."""
    script = "case $HOW in code) exit 3;; signal) kill -SEGV $$;; late) trap '' TERM; sleep 600 & sleep 600;; esac"
    arms = [word for how in ("well", "code", "signal", "late") for word in ("--arm", f"HOW={how}")]
    done = argus("--repeat", "1", *arms, "--timeout", "1s", "--out", str(tmp_path / "o"), "--", "sh", "-c", script)
    assert done.returncode == 10, done.stderr
    metrics, _ = records(tmp_path / "o")
    ends = {run["arm"][4:]: (run["status"], run["exit_code"], run["signal"]) for run in metrics["runs"]}
    assert ends["well"] == ("ok", 0, None)
    assert ends["code"] == ("failed", 3, None)
    assert ends["signal"] == ("failed", None, signal.SIGSEGV)
    assert ends["late"] == ("timeout", None, signal.SIGKILL)


def processes_with(mark: str, what: str = "environ") -> list[int]:
    """Processes whose environment, or command line, has a mark."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and mark.encode() in (place / what).read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_keeps_what_was_done(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder, mark = tmp_path / "o", f"OBSERVE_TEST={tmp_path}"
    script = f"if [ -e {tmp_path}/second ]; then sleep 600 & sleep 600; fi; touch {tmp_path}/second"
    words = [*ARGUS, "--out", str(folder), "--arm", f"x={mark}", "--", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + LIMIT_S
        while len(processes_with(mark)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert "Traceback" not in errors
    until = time.monotonic() + LIMIT_S
    while processes_with(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_with(mark) == []
    metrics, meta = records(folder)
    assert meta["status"] == "interrupted"
    assert [run["status"] for run in metrics["runs"]] == ["ok", "interrupted"]
    assert "argus: stopped after 1 run; " in errors
    again = argus("report", str(folder))
    assert again.returncode == 12
    assert "failure" not in again.stdout, "what was interrupted did not fail"
    assert "1 of 10 runs were made, and one was cut short" in (folder / "report.md").read_text()


def test_a_terminal_shows_the_run_that_goes_on(tmp_path: Path) -> None:
    """Its seconds, drawn anew; and what is no terminal gets one line a run."""
    words = [
        "--repeat",
        "2",
        "--out",
        str(tmp_path / "o"),
        "--",
        "sh",
        "-c",
        f"until [ -e {tmp_path}/go ]; do sleep 0.1; done",
    ]
    here, there = pty.openpty()
    process = subprocess.Popen(
        [*ARGUS, *words], stdin=there, stdout=there, stderr=there, env={**os.environ, "TERM": "xterm"}
    )
    os.close(there)
    output = b""
    try:
        with contextlib.suppress(OSError):  # its other end is closed
            while select.select([here], [], [], LIMIT_S / 4)[0] and (part := os.read(here, 65536)):
                output += part
                if re.search(rb"run 1 of 2  ([2-9]|\d{2,}) s", output):  # a busy machine may skip a second
                    (tmp_path / "go").touch()
    finally:
        (tmp_path / "go").touch()
        code = process.wait(timeout=LIMIT_S)
        os.close(here)
    assert code == 12, output
    lines = output.decode().split("\r\n")
    drawn = [int(second) for second in re.findall(r"\r\x1b\[2Krun 1 of 2  (\d+) s …", lines[0])]
    assert len(drawn) > 1, lines[0]
    assert drawn == sorted(set(drawn)), "each second once, later ones later"
    assert re.search(r"\x1b\[2Krun 1 of 2  [0-9,.]+ m?s$", lines[0]), "the line that stays replaces it"
    plain = argus("--repeat", "2", "--out", str(tmp_path / "p"), "--", "true")
    assert [line.split("  ")[0] for line in plain.stderr.splitlines()] == ["run 1 of 2", "run 2 of 2"]
    assert "\x1b" not in plain.stderr


def test_a_kill_leaves_what_was_done(tmp_path: Path) -> None:
    folder = tmp_path / "o"
    words = [*ARGUS, "--repeat", "500", "--out", str(folder), "--", "true"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for _ in range(3):
            process.stderr.readline()
        process.kill()
        process.stderr.read()
    metrics, meta = records(folder)
    assert meta["status"] == "running"
    assert len(metrics["runs"]) >= 3
    assert metrics["decision"] is None


def test_a_server_runs_beside_each_run(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\nprint('now ready', flush=True)\ntime.sleep(600)\n"
    )
    serve = f"{sys.executable} {tmp_path}/serve.py {tmp_path}/pid"
    load = f"kill -0 $(cat {tmp_path}/pid) && cat {tmp_path}/pid"
    done = argus(
        "--repeat", "2", "--serve", serve, "--ready", "now ready", "--out", str(tmp_path / "o"), "--", "sh", "-c", load
    )
    assert done.returncode == 12, done.stderr
    metrics, _ = records(tmp_path / "o")
    pids = {(tmp_path / "o" / run["output"]["stdout"]).read_text() for run in metrics["runs"]}
    assert len(pids) == 2, "each run has its own"
    assert not processes_with(f"{tmp_path}/serve.py", "cmdline"), "none outlives its run"
    failed = argus("--serve", "false", "--ready", "x", "--out", str(tmp_path / "p"), "--", "true")
    assert (failed.returncode, failed.stderr.splitlines()[0]) == (3, "argus: the server ended")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--out", "{tmp}/o"], 2, "there is no command"),
        (["--out", "{tmp}/o", "--", "no-such-command"], 3, "'no-such-command' was not found"),
        (["--out", "{tmp}/o", "--", "{tmp}/file"], 3, "cannot be executed"),
        (["--out", "{tmp}/o", "--latency-regex", "(", "--", "true"], 2, "not a regular expression"),
        (["--out", "/proc/o", "--", "true"], 1, "/proc/o cannot be made"),
        (["--out", "{tmp}/file", "--", "true"], 2, "is not a folder"),
        (["run", "-f", "{tmp}/none.yaml", "--out", "{tmp}/o"], 2, "cannot be read"),
        (["report", "{tmp}"], 3, "has no metrics.json"),
        (["export", "{tmp}/none"], 3, "there is no"),
        (["--ready", "x", "--out", "{tmp}/o", "--", "true"], 2, "is about a server"),
    ],
)
def test_what_cannot_be_done_is_a_line_that_says_what_to_do(
    tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "file").write_text("")
    done = argus(*(word.format(tmp=tmp_path) for word in words))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


def test_doctor_says_what_disturbs() -> None:
    done = argus("doctor", "--format", "json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["quiet"] else 13)
    assert {item["name"] for item in found["items"]} == {"loop", "others", "steal", "cgroup", "load", "governor", "smt"}


def test_what_was_left_in_other_sessions_ends_with_its_run(tmp_path: Path) -> None:
    """As launchers of workers leave them."""
    script = "import os, subprocess, sys; "
    script += (
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid)"
    )
    argus("--repeat", "2", "--out", str(tmp_path / "o"), "--", sys.executable, "-c", script)
    metrics, _ = records(tmp_path / "o")
    left = [int((tmp_path / "o" / run["output"]["stdout"]).read_text()) for run in metrics["runs"]]
    assert len(left) == 2
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_latencies_that_are_not_there_are_reported(tmp_path: Path) -> None:
    done = argus("--repeat", "2", "--pattern", "latency", "--out", str(tmp_path / "o"), "--", "echo", "took=3 ms")
    line = "note: no latency was found in what 2 of 2 runs printed: wall times are compared instead"
    assert line in done.stdout
    assert "wall times are compared instead" in (tmp_path / "o" / "report.md").read_text()


def test_a_signal_while_a_run_is_being_started_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy node the command may run before Argus has heard of it."""
    mark = f"OBSERVE_TEST={tmp_path}"
    begin = subprocess.Popen.__init__

    def begin_late(self: object, *words: object, **more: object) -> None:
        begin(self, *words, **more)  # type: ignore[call-overload]
        until = time.monotonic() + LIMIT_S
        while len(processes_with(mark)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "__init__", begin_late)
    environment = {**os.environ, "OBSERVE_TEST": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        execute.start(["sh", "-c", "sleep 600 & sleep 600"], environment, subprocess.DEVNULL, subprocess.DEVNULL)
    until = time.monotonic() + LIMIT_S
    while processes_with(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_with(mark) == []
