"""Names of others reach terminals, files and logs as text: every verb, on a store in which every name is hostile.

What no verb may print: a control character other than tab and newline, one that turns the order of text around, or a
line that a name made.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from argus.cli import completion
from argus.cli.live import Scene, frame, plain_line
from argus.cli.main import VERBS, cli
from argus.cli.output import SafeText, styled
from argus.health.output import FORMATS
from argus.model.text import harmless, printable
from argus.simulate.faults import Fault, parse
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import open_store
from argus.store.schema_files import table_columns
from argus.store.writer import Writer
from tests.builders import flight_dumps, training_job
from tests.builders.live_views import a_view, degraded
from tests.e2e.verbs import commands
from tests.forked import ROOT, argus_bytes
from tests.stores import new_store
from tests.terminal import Terminal
from tests.unit.importers import test_nsys
from tests.unit.importers.dumps import test_ras

EVIL = "\x07\rFORGED owned\x1b]0;x\x07\x9b2J[/bold]\u202e\nFORGED \x1b[8m\x1b[1A\x1b[2K\r\x1b[2K"
"""Its first 15 bytes, of which a thread's name consists, end a line, too."""
JOB = f"job{EVIL}"
OTHER = f"other{EVIL}"
NAMES = (
    "job", "host", "hosts", "kernel", "name", "thread", "exe", "command", "libraries", "functions", "files",
    "leaf_function", "leaf_file", "python_function", "python_file", "why", "text", "hint", "device", "shape",
    "error", "reason", "path", "container", "machine", "launcher", "description",
)  # fmt: skip
"""Columns that hold what others chose."""
_EVIL = """
import ctypes, sys, threading, time
libc, name = ctypes.CDLL(None), sys.argv[1]
def wait(ready):
    libc.prctl(15, name.encode()[:15], 0, 0, 0)
    ready.set()
    while True:
        sum(range(100_000))
        time.sleep(0.05)
wait.__code__ = wait.__code__.replace(co_name=name, co_qualname=name, co_filename=name)
ready = threading.Event()
threading.Thread(target=wait, args=(ready,), daemon=True).start()
ready.wait()
print(flush=True)
wait(ready)
"""
TEXTS = (".html", ".json", ".jsonl", ".csv", ".md", ".txt", ".prom", ".svg", ".folded", ".pages", ".1")
"""Of files that Argus writes, those that are text."""
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="reads another process")
ARGUS = [sys.executable, "-m", "argus.cli.main"]
BAD = re.compile(r"[^\n\t\x20-\x7e\xa0-\u200d\u2010-\u2027\u202f-\u2065\u2070-\ufefe\uff00-\uffef]")
FORGED = re.compile("^FORGED", re.MULTILINE)
OWN = re.compile(r"\x1b\[(?:(?!8m)[0-9;]*m|\?25[lh])")
"""What Argus sends to a terminal itself: colours, none of which hides text, as that in a name would."""
BAR = re.compile(r"\r?(?:\x1b\[1A)?\x1b\[2K")
"""So that a bar is drawn anew."""


def hostile(value: Any) -> Any:
    """The same with something behind each name."""
    if isinstance(value, str):
        return f"{value}{EVIL}"
    if isinstance(value, (list, tuple)):
        return [hostile(each) for each in value]
    return value


def spoilt(table: str, rows: Any) -> dict[str, Any]:
    columns = rows.to_pydict() if isinstance(rows, pa.Table) else dict(rows)
    for name in columns.keys() & set(NAMES):
        if "String" in table_columns()[table][name].type:
            values = columns[name]
            if isinstance(values, (pa.Array, np.ndarray)):
                values = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
            columns[name] = hostile(values)
    return columns


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with one job, all of whose names are hostile. Its engine goes on from verb to verb."""
    url = new_store(tmp_path_factory.mktemp("hostile"))
    kept = Writer.append
    with pytest.MonkeyPatch.context() as patch, open_store(url) as opened:
        patch.setattr(Writer, "append", lambda self, table, rows: kept(self, table, spoilt(table, rows)))
        mesh = Mesh(dp=4, tp=1, pp=1, ep=1, vpp=1, per_host=2)
        faults: list[Fault] = [parse("compute_straggler:ranks=1")]
        write(opened, "other", Spec(mesh, steps=60, kernels=2))
        write(opened, "job", Spec(mesh, faults=faults, steps=60, kernels=2))
        with Writer(opened, source="test") as writer:
            stack = {
                "stack_id": np.array([7], np.uint64), "kinds": [["python"]], "functions": [["f"]], "files": [["x.py"]],
                "lines": [[3]], "depth": 1, "leaf_kind": "python", "leaf_function": "f", "leaf_file": "x.py",
                "python_function": "f", "python_file": "x.py", "python_line": 3, "python": "complete", "native": "none",
            }  # fmt: skip
            run, begin = opened_run(opened)
            for number, (job, its_run) in enumerate((("job", run), ("other", run - 1))):
                writer.append("environments", {
                    "job": job, "run": its_run, "rank": 0, "host": "node0", "pid": 7, "ts": np.array([begin], np.int64),
                    "facts": [{f"env.NCCL_X{EVIL}": f"{number}{EVIL}", "python.version": f"3{EVIL}", "command": EVIL}],
                    "digest": np.array([number], np.uint64), "version": 1,
                })  # fmt: skip
            writer.append("stacks", {"job": "job", "run": run, **stack})
            for rank in range(4):
                writer.append("stack_samples", {
                    "job": "job", "run": run, "rank": rank, "host": "node0", "pid": 7 + rank, "tid": 7 + rank,
                    "thread": "main", "ts": np.array([begin], np.int64), "last_ts": np.array([begin + 10**9], np.int64),
                    "kind": "cpu", "reason": "", "gil": True, "gc": False, "in_kernel": False, "count": 99,
                    "ns": 10**9, "runqueue_ns": 0, "max_ns": 0, "stack_id": np.array([7], np.uint64),
                })  # fmt: skip
        patch.undo()
        with opened.lease():
            yield url


def opened_run(opened: Any) -> tuple[int, int]:
    from argus.store.reader import query_columns

    found = query_columns(opened, "SELECT max(run) AS run, toUnixTimestamp64Nano(max(ts)) AS at FROM iterations", {})
    return int(found["run"][0]), int(found["at"][0]) - 10**9


def profile(folder: Path) -> Path:
    """A trace of PyTorch's profiler."""
    events = [
        {"ph": "X", "cat": "kernel", "name": f"k{EVIL}", "pid": 0, "tid": 7, "ts": 10 * n, "dur": 5,
         "args": {"device": 0, "stream": 7, "correlation": n}}
        for n in range(100)
    ]  # fmt: skip
    events += [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "pid": 1, "tid": 1, "ts": 100 * n,
                "dur": 99} for n in range(10)]  # fmt: skip
    path = folder / f"trace{_IN_NAME}.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "deviceProperties": []}))
    return path


_IN_NAME = EVIL.replace("/", "")
_MEANT = {"version", "timestamp", "nccl_version", "inspector_output_format_version", "coll", "state", "profiling_name"}
"""Keys of texts without which a recording is none."""


def named(value: Any, key: str = "") -> Any:
    """A recording with something behind each text in it."""
    if isinstance(value, dict):
        return {name: named(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [named(each, key) for each in value]
    return f"{value}{EVIL}" if isinstance(value, str) and key not in _MEANT else value


def dumps(folder: Path) -> Path:
    """PyTorch's dumps of NCCL calls."""
    hang = flight_dumps.run(flight_dumps.job(1, 1, 4), [flight_dumps.Fault("cpu", 2, 9)])
    written = flight_dumps.write(folder / f"dumps{_IN_NAME}", hang, as_json=True)
    for path in written.iterdir():
        path.write_text(json.dumps(named(json.loads(path.read_text()))))
    return written


def ras(folder: Path) -> Path:
    path = folder / f"ras{_IN_NAME}.json"
    path.write_text(json.dumps(named(test_ras.report([5, 5, 4], gone=(1,)))))
    return path


def inspected(folder: Path) -> Path:
    path = folder / f"inspector{_IN_NAME}.log"
    lines = [named(test_ras.line(rank, seq, 900)) for seq in range(1, 21) for rank in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def nsight(folder: Path) -> Path:
    """An export of Nsight Systems."""
    path = test_nsys.export(folder / f"report{_IN_NAME}.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE StringIds SET value = value || ?", (EVIL,))
    return path


def times(folder: Path) -> Path:
    path = folder / f"times{_IN_NAME}.csv"
    quoted = '"' + EVIL.replace('"', '""') + '"'
    lines = [f'"host{rank}{EVIL}",{step},{50 + step % 3}' for rank in range(2) for step in range(20)]
    path.write_text("\n".join([f"{quoted},step,ms", *lines]) + "\n", newline="")
    return path


def operations(folder: Path) -> Path:
    """Operations of pipeline stages."""
    trace, meta = training_job.write(folder, training_job.rows(steps=3))
    meta.unlink()
    return trace.rename(folder / f"made{_IN_NAME}.parquet")


GIVEN = "given"
"""What others wrote, not Argus."""
RECORDINGS = {
    "PROFILE": profile, "DUMPS": dumps, "RAS": ras, "INSPECTED": inspected, "NSIGHT": nsight, "TIMES": times,
    "OPERATIONS": operations,
}  # fmt: skip


def placed(word: str, folder: Path) -> str:
    """A word with what lies in a folder of the test."""
    if word in RECORDINGS:
        (given := folder / GIVEN).mkdir()
        return str(RECORDINGS[word](given))
    return word.replace("PAGES", str(folder)).replace("SPOOL", f"spool://{folder}/spool")


COMMANDS: dict[str, list[list[str]]] = {
    "check": [[]],
    "trace": [["--pid", f"1{EVIL}"], ["--name", f"nobody{EVIL}", "--duration", "1s"]],
    "run": [["--user", f"nobody{EVIL}", "--", "true"]],
    "arm": [["--status"]],
    "dump": [[f"{EVIL}"]],
    "import": [
        [f"x{EVIL}"],
        ["kineto", "PROFILE", "--store", "SPOOL"],
        ["nsys", "NSIGHT", "--store", "SPOOL"],
        ["whatif", "OPERATIONS", "--store", "SPOOL"],
        ["whatif", "OPERATIONS", "--meta", f"/nowhere{EVIL}"],
        [
            "iterations",
            "TIMES",
            "--rank-column",
            EVIL,
            "--step-column",
            "step",
            "--duration-column",
            "ms",
            "--store",
            "SPOOL",
        ],
        ["iterations", "TIMES", "--rank-column", f"x{EVIL}", "--step-column", "step", "--duration-column", "ms"],
        ["flight-recorder", "DUMPS", "--store", "SPOOL"],
        ["ras", "RAS", "--store", "SPOOL"],
        ["inspector", "INSPECTED", "--store", "SPOOL"],
    ],
    "simulate": [["--fault", f"x{EVIL}"]],
    "demo": [["--seed", f"x{EVIL}"]],
    "diagnose": [[], ["-v"], ["--sql"], ["--format", "json"], ["--job", f"no{EVIL}"], ["--rank", "1"]],
    "report": [["-o", "-"], ["-o", "FILE.html"], ["-o", f"/nowhere/{EVIL}"], ["--job", f"x{EVIL}"]],
    "serve": [["--listen", f"x{EVIL}"], ["--listen", "203.0.113.7:0", "--token-file", f"/nowhere{EVIL}"]],
    "compare": [
        [JOB, "--against", OTHER],
        [JOB, "--against", OTHER, "--format", "json"],
        [JOB],
        [f"x{EVIL}"],
        [f"{JOB}@{EVIL}"],
    ],
    "baseline": [["set", JOB], ["list"], ["list", "--format", "json"], ["show", JOB], ["rm", JOB], ["rm", f"x{EVIL}"]],
    "explain": [[f"x{EVIL}"], []],
    "stacks": [[], ["--format", "json"], ["--frames", "0"]],
    "export": [
        ["folded"],
        ["svg"],
        ["speedscope"],
        ["folded", "--diff", "rank=0", "--rank", "1"],
        ["perfetto"],
        ["perfetto", "--last", "9s", "-o", "FILE.pftrace"],
        ["perfetto", "--last", "9s", "-o", "FILE.json"],
        ["pprof", "-o", "FILE.pb"],
        ["csv", "ranks", "-o", "FILE.csv"],
        ["parquet", "ranks", "-o", "FILE.parquet"],
        ["csv", f"x{EVIL}", "-o", "FILE.csv"],
        ["csv", "ranks", "-o", f"/nowhere/{EVIL}"],
    ],
    "flag": [["--last", "5s", "--why", f"w{EVIL}"]],
    "jobs": [[], ["--format", "json"], [f"x{EVIL}"]],
    "sql": [
        ["SELECT DISTINCT job, host FROM ranks"],
        *(
            ["--format", kind, "SELECT DISTINCT job, host FROM iterations"]
            for kind in ("table", "json", "jsonl", "csv", "tsv")
        ),
        [f"SELECT '{EVIL}' FROM nowhere"],
    ],
    "health": [
        ["report", "--all"],
        ["--trend"],
        ["--only", f"x{EVIL}"],
        ["--config", f"/nowhere{EVIL}"],
        ["install-cron", "--print", "--user", f"x{EVIL}"],
        ["install-cron", "--print", "--mail", f"x{EVIL}"],
        ["install-cron", "--print", "--config", f"/nowhere{EVIL}"],
        ["install-cron", "--cron-file", f"/nowhere{EVIL}/x"],
    ],
    "store": [
        ["status"],
        ["init", "--ttl", f"x{EVIL}"],
        ["init", "--store", f"clickhouse://x{EVIL}"],
        ["load", f"/nowhere{EVIL}"],
        ["rm", f"x{EVIL}", "--yes"],
    ],
    "observe": [
        ["run", "--out", "FILE.runs", "--repeat", "2", "--", f"x{EVIL}"],
        ["doctor"],
        ["report", f"/nowhere{EVIL}"],
        ["export", f"/nowhere{EVIL}", "--sanitize"],
        ["--out", "FILE.runs", "--", f"x{EVIL}"],
        ["--out", "FILE.runs", "--repeat", "2", "--arm", f"x{EVIL}=A=1", "--arm", "y", "--", "true"],
        ["--out", "FILE.runs", "--repeat", "2", "--arm", f"x=A={EVIL}", "--", "printf", EVIL],
        ["--out", "FILE.runs", "--repeat", "2", "--format", "json", "--", "sh", "-c", ":", EVIL],
        ["--out", "FILE.runs", "-f", f"/nowhere{EVIL}"],
    ],
    "completion": [["bash"]],
    "man": [["PAGES"]],
}


def test_every_verb_is_here() -> None:
    """And every command that is part of one."""
    run = [" ".join((verb, *words)) for verb, every in COMMANDS.items() for words in every]
    assert [name for name in commands(cli) if not any(f"{line} ".startswith(f"{name} ") for line in run)] == []
    assert COMMANDS.keys() == VERBS.keys()


@pytest.mark.parametrize(
    ("verb", "words"),
    [(verb, words) for verb, every in COMMANDS.items() for words in every],
    ids=[f"{verb} {number}" for verb, every in COMMANDS.items() for number in range(len(every))],
)
def test_what_a_verb_prints_is_text(verb: str, words: list[str], store: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ARGUS_STORE": store}
    words = [placed(word, tmp_path) for word in words]
    words = [f"{tmp_path}/a{EVIL.replace('/', '')}{word}" if word.startswith("FILE.") else word for word in words]
    done = argus_bytes(verb, *words, env=environment)
    for output in (done.stdout, done.stderr):
        text = output.decode("utf-8")
        found = BAD.search(text) or (FORGED.search(text) if own_lines(verb, words) else None)
        assert found is None, text[max(found.start() - 200, 0) : found.end() + 50]
    assert b"internal error" not in done.stderr, done.stderr
    for path in tmp_path.rglob("*"):
        if path.suffix in TEXTS and path.is_file() and GIVEN not in path.parts:
            found = BAD.search(text := path.read_text("utf-8"))
            assert found is None, (path, text[max(found.start() - 200, 0) : found.end() + 50])


def assert_harmless(*outputs: str) -> None:
    for text in outputs:
        found = BAD.search(text) or FORGED.search(text)
        assert found is None, text[max(found.start() - 200, 0) : found.end() + 50]


def on_a_terminal(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a verb prints on a terminal."""
    here, there = pty.openpty()
    environment = {**environment, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([*ARGUS, *words], stdin=there, stdout=there, stderr=there, env=environment)
    os.close(there)
    output = b""
    with contextlib.suppress(OSError):  # its other end is closed
        while select.select([here], [], [], 120)[0] and (part := os.read(here, 65536)):
            output += part
    os.close(here)
    assert process.wait(timeout=60) == 0, output
    return output.decode()


def shown_on_a_terminal(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The same without the escapes that are Argus's own."""
    text = OWN.sub("", on_a_terminal(words, environment))
    return (BAR.sub("", text) if "import" in words else text).replace("\r\n", "\n")


@pytest.fixture
def evil_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank whose program, job, threads, functions and files are named by somebody hostile."""
    program = tmp_path / f"python{EVIL.replace('/', '')}"
    shutil.copy(os.path.realpath("/usr/bin/python3"), program)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": JOB, "PYTHONHOME": "/usr"}
    with subprocess.Popen([program, "-c", _EVIL, EVIL], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@AS_ROOT
def test_processes_to_choose_from_are_listed_as_text(evil_process: subprocess.Popen[bytes]) -> None:
    for verb in ("trace", "dump"):
        done = argus_bytes(verb)
        assert done.returncode == 2, done.stderr
        text = done.stdout.decode()
        assert any(line.split()[:1] == [str(evil_process.pid)] for line in text.splitlines())
        assert_harmless(text, done.stderr.decode())


@AS_ROOT
@pytest.mark.kernel
@pytest.mark.parametrize("words", [(), ("--each",), ("--format", "json")])
def test_a_dump_of_hostile_names_is_text(words: tuple[str, ...], evil_process: subprocess.Popen[bytes]) -> None:
    words = ("dump", str(evil_process.pid), str(os.getpid()), *words)
    done = argus_bytes(*words)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert text.count("owned") >= 3, "a thread, functions, a file"
    assert_harmless(text, done.stderr.decode(), shown_on_a_terminal(words, os.environ))


@AS_ROOT
@pytest.mark.kernel
def test_a_trace_of_hostile_names_is_text(evil_process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    environment = {**os.environ, "ARGUS_STORE": new_store(tmp_path)}
    words = (str(evil_process.pid), "--duration", "5s")
    with open_store(environment["ARGUS_STORE"]).lease():
        traced = argus_bytes("trace", *words, env=environment)
        assert traced.returncode == 0, traced.stderr
        printed = [traced, *(argus_bytes(verb, env=environment) for verb in ("jobs", "stacks", "diagnose"))]
        page = tmp_path / "page.html"
        argus_bytes("report", "-o", str(page), env=environment)
    assert b"owned" in printed[1].stdout
    assert b"owned" in printed[2].stdout
    assert_harmless(*((done.stdout + done.stderr).decode() for done in printed))
    assert not BAD.search(page.read_text())


@AS_ROOT
@pytest.mark.parametrize("form", list(FORMATS))
def test_a_file_about_a_node_with_a_hostile_name_has_lines_of_its_form(form: str, tmp_path: Path) -> None:
    settings, file = tmp_path / "health.toml", tmp_path / "x.prom"
    settings.write_text(f'state_dir = "{tmp_path}/state"\n')
    named = "import socket, sys; socket.sethostname(sys.argv.pop(1)); from argus.cli.main import main; sys.exit(main())"
    words = ["--config", str(settings), "--no-store", "--only", "memory", "--format", form, "--output", str(file)]
    command = ["unshare", "--uts", sys.executable, "-c", named, f"n{EVIL}"[:60], "health", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = file.read_text()
    assert_harmless(done.stdout, done.stderr, text)
    assert "owned" in text
    if form == "prometheus-textfile":
        sample = re.compile(r'argus_health_[a-z_]+\{([a-z]+="([^"\\]|\\[\\"n])*",?)*\} [0-9.e+-]+')
        assert all(line.startswith("# ") or sample.fullmatch(line) for line in text.splitlines())


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "-v"],
        ["diagnose", "--sql"],
        ["jobs"],
        ["jobs", "--format", "json"],
        ["stacks"],
        ["compare", JOB, "--against", OTHER],
        ["store", "status"],
        ["export", "folded"],
        ["import", "kineto", "PROFILE", "--store", "SPOOL"],
        ["sql", "SELECT DISTINCT job, host FROM ranks"],
        *(
            ["sql", "--format", kind, "SELECT DISTINCT job, host FROM ranks"]
            for kind in ("json", "jsonl", "csv", "tsv")
        ),
    ],
)
def test_a_terminal_gets_colours_and_nothing_else(words: list[str], store: str, tmp_path: Path) -> None:
    """The same where Argus itself sends escapes."""
    words = [placed(word, tmp_path) for word in words]
    text = shown_on_a_terminal(words, {**os.environ, "ARGUS_STORE": store})
    assert "owned" in text
    found = BAD.search(text) or (FORGED.search(text) if own_lines(words[0], words) else None)
    assert found is None, text[max(found.start() - 200, 0) : found.end() + 50]


OBEYED = (
    "$(id)", "`id`", "a;id", "a&id", "a|id", "a>b", "a<b", "a b", "a\tb", "a\nid", "a\\", "'a", 'a"', "a*", "a?", "[a]",
    "{a,b}", "~root", "a=~root", "a:~root", "!!", "a!b", "^a^b", "#a", "=id", "a==id", "a:=id", "%self", "-x", "--job",
    "(a)", "a#", "\xe9", "", EVIL, JOB,
)  # fmt: skip
"""Words that bash, zsh or fish would take for something else, or that are more than they seem."""


@pytest.mark.parametrize("name", OBEYED)
def test_no_word_that_a_shell_obeys_is_offered_by_tab(name: str) -> None:
    names = [{"job": name, "run": name, "ranks": [name]}, {"job": "a", "run": 7, "ranks": [1]}]
    assert completion.choices("job", names, ["diagnose", "--job"], "") == ["a"]
    assert completion.choices("run", names, ["diagnose", "--run"], "") == ["7"]
    assert completion.choices("rank", names, ["diagnose", "--rank"], "") == []


@pytest.mark.parametrize("name", ["llama-3.1_70b@a", "team/x:7", "lr=0.1,bs=2+4", "50%", "A", "0"])
def test_other_names_are_offered_by_tab(name: str) -> None:
    assert completion.choices("job", [{"job": name, "run": 7, "ranks": [1]}], ["jobs"], "") == [name]


def test_a_name_that_bash_completed_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, program, url = tmp_path / "proof", tmp_path / "argus", f"spool://{tmp_path}/none"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} -m argus.cli.main "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    environment = {"ARGUS_STORE": url, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with Terminal(200, environment=environment) as terminal:
        terminal.type('eval "$(argus completion bash)"; echo re"ady"\n')
        terminal.wait_for("ready")
        completion._write(completion.names_file(url), [{"job": f"$(id>{proof})", "run": 1, "ranks": [0]}])
        terminal.type("argus flag --job \t\n")
        terminal.wait_for("requires an argument")
        assert not proof.exists()
        completion._write(completion.names_file(url), [{"job": "llama", "run": 1, "ranks": [0]}])
        terminal.type("argus flag --job \t")
        terminal.wait_for("--job llama")


@pytest.mark.parametrize("words", [["explain", "compute_straggler"], ["diagnose"]])
def test_colours_of_argus_reach_a_terminal(words: list[str], store: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    assert "\x1b[1" in on_a_terminal(words, {**environment, "ARGUS_STORE": store})


def test_lines_of_progress_are_drawn_anew_on_a_terminal(store: str, tmp_path: Path) -> None:
    shown = on_a_terminal(["simulate", "--ranks", "2", "--steps", "30", "--store", new_store(tmp_path)], {**os.environ})
    assert "\r\x1b[2K" in shown
    assert "u000d" not in shown


def own_lines(verb: str, words: list[str]) -> bool:
    """Whether a name may make no line: where the user gave it, or a format quotes it, it may."""
    verbs = ("diagnose", "stacks", "flag", "jobs", "sql", "store", "health", "compare", "baseline", "import", "export")
    return verb in verbs and not (any(EVIL in word for word in words if word != f"w{EVIL}") or "csv" in words)


def test_the_live_view_shows_any_name() -> None:
    """Also what would be markup: rich's would raise on it, or swallow it."""
    view = a_view(gpu=False, kernels=[(f"k{EVIL}", 5), ("f[abi:cxx11]", 3)], gpu_kernels=[], notes=[f"n{EVIL}"])
    for page in ("", "?", "d", "s", "l", "g"):
        lines = frame(view, degraded(2), Scene(page=page), 120, 40)
        console = Console(file=io.StringIO(), force_terminal=True, width=120)
        for line in lines:
            console.print(line, markup=False)
    text = "\n".join(line.plain for line in frame(view, {}, Scene(), 120, 40))
    assert "f[abi:cxx11]" in text
    assert "[/bold]" in text
    assert not BAD.search(printable(plain_line(view, {})))


def test_a_frame_on_a_terminal_has_only_its_own_escapes() -> None:
    from argus.cli.screen import Screen

    here, there = pty.openpty()
    with open(there, "w", encoding="utf-8") as terminal:
        screen = Screen(Console(file=terminal, force_terminal=True, width=80, height=24))
        screen._shown = True
        view = a_view(gpu=False, kernels=[(f"k{EVIL}", 5)], gpu_kernels=[], notes=[f"n{EVIL}"])
        screen.draw(frame(view, {}, Scene(), 80, 24))
        data = b""
        while b"\x1b[?2026l" not in data and select.select([here], [], [], 60)[0]:
            data += os.read(here, 1 << 16)  # it arrives a part at a time
    os.close(here)
    output = data.decode()
    assert "nFORGED owned?]0;" in output
    assert "\x1b]" not in output
    assert "\x9b" not in output
    assert "\x07" not in output


def test_text_is_made_harmless_once() -> None:
    assert harmless("plain\ttext\n") == "plain\ttext\n"
    assert harmless("\x1b[31mred\x1b[0m") == "\\u001b[31mred\\u001b[0m"
    assert harmless("\x1b[31mred\x1b[0m\x1b]0;x\x07", styled=True) == "\x1b[31mred\x1b[0m\\u001b]0;x\\u0007"
    assert json.loads(harmless(json.dumps(EVIL, ensure_ascii=False))) == EVIL


@pytest.fixture
def stream() -> tuple[SafeText, io.BytesIO]:
    raw = io.BytesIO()
    return SafeText(raw, encoding="utf-8", write_through=True), raw


def test_a_stream_takes_text_and_bytes(stream: tuple[SafeText, io.BytesIO]) -> None:
    text, raw = stream
    print("a\x1b]0;b\x07", file=text)
    text.buffer.write(b"\x1b")
    assert raw.getvalue() == b"a\\u001b]0;b\\u0007\n\x1b"


def test_only_what_is_styled_keeps_its_colours(
    stream: tuple[SafeText, io.BytesIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, raw = stream
    monkeypatch.setenv("FORCE_COLOR", "1")
    print("\x1b[8m\r\x1b[1A\x1b[2K", file=text)
    print("\x1b[31mred\x1b]0;x", file=styled(text))
    assert raw.getvalue() == b"\\u001b[8m\\u000d\\u001b[1A\\u001b[2K\n\x1b[31mred\\u001b]0;x\n"
    monkeypatch.delenv("FORCE_COLOR")
    print("\x1b[31m", file=styled(text))
    assert raw.getvalue().endswith(b"\n\\u001b[31m\n"), "this is no terminal"
