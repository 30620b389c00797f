"""``argus run``: the command is traced, and notices nothing. Programs that are armed behave as if they were not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from argus.cupti import arm, build
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import ARGUS, Log
from tests.lacking import open_terminal
from tests.stores import new_store

Run = Callable[..., "subprocess.CompletedProcess[str]"]

NO_ROOT = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def run_in(store_url: str) -> Run:
    """``argus run WORDS`` with a store."""

    def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        plain = {name: value for name, value in os.environ.items() if name not in (arm.VARIABLE, arm.SWITCH)}
        return subprocess.run(
            [*ARGUS, "run", "--store", store_url, *words],
            capture_output=True, text=True, timeout=120, check=False, env={**plain, **environment},
        )  # fmt: skip

    return call


@pytest.fixture
def run(store_url: str) -> Run:
    """``argus run WORDS``."""
    return run_in(store_url)


def count(store_url: str, sql: str) -> int:
    with open_store(store_url, create=False) as store:
        return int(query_columns(store, sql)["n"][0])


# ---- traced


@pytest.mark.kernel
def test_a_command_is_traced_from_its_first_call(run: Run, store_url: str, fakegpu: Path) -> None:
    done = run("--job", "mine", "--run", "7", "--", str(fakegpu / "fake_train"), "--exact", "1009", "0")
    assert done.returncode == 0, done.stderr
    assert "argus: tracing; GPU times: armed" in done.stderr
    assert "next: argus diagnose" in done.stderr
    assert "processes_probed_late" not in done.stderr
    own = "WHERE job = 'mine' AND run = 7"
    assert count(store_url, f"SELECT count() AS n FROM launches {own} AND kind = 'kernel' AND NOT in_nccl") == 1009
    # the command itself, not what stood in its place while it waited
    assert (
        count(store_url, f"SELECT count() AS n FROM ranks FINAL {own} AND command LIKE '%fake_train --exact 1009%'")
        == 1
    )


@pytest.mark.kernel
def test_the_ranks_of_a_launcher_are_traced(run: Run, store_url: str, root: Path) -> None:
    launcher = [sys.executable, str(root / "tests/fakegpu/run.py"), "--ranks", "3", "--", "--steps", "40"]
    done = run("--log", "/dev/stderr", "--", *launcher)
    assert done.returncode == 0, done.stderr
    assert "3 ranks" in done.stderr
    assert count(store_url, "SELECT uniqExact(rank) AS n FROM launches") == 3


@pytest.mark.kernel
def test_a_command_is_judged_while_it_runs(store_url: str, root: Path, tmp_path: Path) -> None:
    """What is found goes to the log at once. Rounds come every 2 s here, every 10 s elsewhere."""
    often = (
        "from argus.diagnose.follow.watch import Watch; Watch.__init__.__defaults__ = (2.0,)\n"
        "import sys; from argus.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    log, stop = tmp_path / "argus.log", tmp_path / "stop"
    # The job ends when findings have been reported, or after two minutes: the engine yields to everything else.
    job = (
        f"{sys.executable} {root}/tests/fakegpu/run.py --ranks 3 --cupti --env FAKEGPU_SLOW_RANK=1"
        " --env FAKEGPU_SLOW_FACTOR=2 -- --steps 0 & pid=$!;"
        f" for i in $(seq 240); do grep -q found: {log} && break; sleep 0.5; done;"
        f" grep -c found: {log} >{stop}; kill $pid; wait $pid; true"
    )
    done = subprocess.run(
        [sys.executable, "-c", often, "run", "--store", store_url, "--log", str(log), "--", "sh", "-c", job],
        capture_output=True, text=True, timeout=240, check=False, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "found: compute straggler: rank 1" in log.read_text()
    assert int(stop.read_text()) >= 1  # it was there before the command had ended


# ---- the command's own


EXITS = {
    "exit 0": 0,
    "exit 7": 7,
    "kill -9 $$": 137,
    "kill -TERM $$": 143,
    "exit 255": 255,
}
BAD = {"/no/such/program": 127, "no-such-program": 127, "/etc/passwd": 126}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """What came of one of these commands: all of its kind are run, several at a time."""

    def call(words: list[str]) -> subprocess.CompletedProcess[str]:
        return run_in(new_store(tmp_path_factory.mktemp("run")))("--", *words)

    @cache
    def of_kind(bad: bool) -> dict[str, subprocess.CompletedProcess[str]]:
        commands = {command: [command] for command in BAD} if bad else {each: ["sh", "-c", each] for each in EXITS}
        with ThreadPoolExecutor(4) as pool:
            return dict(zip(commands, pool.map(call, commands.values()), strict=True))

    return lambda command: of_kind(command in BAD)[command]


@pytest.mark.parametrize(("script", "code"), EXITS.items())
@pytest.mark.kernel
def test_the_exit_code_is_the_commands(
    ended: Callable[[str], subprocess.CompletedProcess[str]], script: str, code: int
) -> None:
    assert ended(script).returncode == code


@pytest.mark.kernel
def test_input_output_and_arguments_are_the_commands(store_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = 'cat; echo "$0|$1" >&2; echo fd >&5'
    done = subprocess.run(
        [*ARGUS, "run", "--store", store_url, "--log", log, "sh", "-c", script, "a b", "--job"],
        input="through\n", capture_output=True, text=True, timeout=60, check=False, close_fds=False,
        preexec_fn=lambda: os.dup2(1, 5),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "through\nfd\n", "a b|--job\n")
    assert "argus: tracing" in log.read_text()


@pytest.mark.parametrize(("command", "code"), BAD.items())
def test_a_command_that_does_not_start_fails_as_in_a_shell(
    ended: Callable[[str], subprocess.CompletedProcess[str]], command: str, code: int
) -> None:
    done = ended(command)
    assert done.returncode == code
    assert f"argus: {command}: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.kernel
def test_signals_reach_the_command_once(store_url: str) -> None:
    script = (
        "import signal, sys, time; got = []; "
        "[signal.signal(s, lambda n, f: got.append(n)) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]; "
        "print('ready', flush=True); end = time.monotonic() + 20\n"
        "while time.monotonic() < end and signal.SIGTERM not in got: time.sleep(0.01)\n"
        "time.sleep(0.3); print(sorted(got)); sys.exit(5)"
    )
    with subprocess.Popen(
        [*ARGUS, "run", "--store", store_url, "--", sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            running.send_signal(number)
            time.sleep(0.1)
        output, _ = running.communicate(timeout=60)
    assert output == "[2, 10, 15]\n"
    assert running.returncode == 5


@pytest.mark.kernel
def test_ctrl_c_ends_the_command_and_argus_sums_up(store_url: str, tmp_path: Path, fakegpu: Path) -> None:
    log = Log(tmp_path, 1)
    leader, follower = open_terminal()
    process = subprocess.Popen(
        [*ARGUS, "run", "--store", store_url, "--", str(fakegpu / "fake_train"), *log.args],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(follower)
    output = b""
    while b"argus: tracing" not in output:
        output += os.read(leader, 4096)
    log.wait_for_steps(20)
    os.write(leader, b"\x03")
    try:
        while chunk := os.read(leader, 4096):
            output += chunk
    except OSError:
        pass  # the other side is closed
    assert process.wait(30) == 0, "fake_train ends in good order"
    assert b"launches" in output
    assert b"argus diagnose" in output
    assert count(store_url, "SELECT count() AS n FROM launches") > 1000


# ---- Argus's failures are not the command's


def test_without_permission_the_command_runs_all_the_same(store_url: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    command = [*ARGUS, "run", "--store", f"chdb://{tmp_path}/other"]
    prefix = NO_ROOT if os.geteuid() == 0 else []
    readable = subprocess.run([*prefix, sys.executable, "-c", "import argus"], check=False, capture_output=True)
    if readable.returncode:
        return  # nobody may read this checkout: the next test has the same reason for failing, elsewhere
    done = subprocess.run([*prefix, *command, "--", "sh", "-c", "exit 3"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("argus: tracing is off: ")
    done = subprocess.run(
        [*prefix, *command, "--strict", "--", "touch", f"{tmp_path}/ran"], capture_output=True, check=False
    )
    assert done.returncode == 3
    assert not (tmp_path / "ran").exists()


def test_a_store_that_cannot_be_had_stops_nothing(tmp_path: Path) -> None:
    command = [*ARGUS, "run", "--store", "clickhouse://nobody@127.0.0.1:1/x"]
    done = subprocess.run([*command, "--", "sh", "-c", "echo ran; exit 4"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (4, "ran\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("argus: tracing is off: ")
    done = subprocess.run([*command, "--strict", "--", "echo", "ran"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.kernel
def test_the_command_outlives_a_killed_tracer(store_url: str) -> None:
    with subprocess.Popen(
        [*ARGUS, "run", "--store", store_url, "--", "sh", "-c", "echo ready; read word; exit 6"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        # The watcher is nobody's child: it is found by what it is.
        same = [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if pid != running.pid and store_url in _command(pid) and " run " in _command(pid)
        ]
        assert len(same) == 1
        os.kill(same[0], signal.SIGKILL)
        _, errors = running.communicate("go\n", timeout=30)
    assert running.returncode == 6
    assert "tracing ended before the command did" in errors


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


# ---- the environment


SHOW = f'echo "${arm.VARIABLE}|${arm.WAIT_VARIABLE}|$NVTX_INJECTION64_PATH|$(id -un)|$HOME"'


@pytest.mark.kernel
def test_what_is_set_for_the_command(tmp_path: Path) -> None:
    (tmp_path / "libcupti.so.13").touch()
    home = os.environ.get("HOME", "")

    def call(name: str, *words: str, **environment: str) -> Future[subprocess.CompletedProcess[str]]:
        return pool.submit(run_in(new_store(tmp_path / name)), *words, "--", "sh", "-c", SHOW, **environment)

    with ThreadPoolExecutor(4) as pool:
        plain = call("plain")
        taken = call("taken", **{arm.VARIABLE: "/theirs.so"})
        nvtx = call("nvtx", "--nvtx", LD_LIBRARY_PATH=str(tmp_path))
        other = call("other", "--user", "nobody")
    assert plain.result().stdout == f"{build.library()}|1000||root|{home}\n"
    assert taken.result().stdout == f"/theirs.so|||root|{home}\n"
    assert "GPU times: off: CUDA_INJECTION64_PATH is taken by /theirs.so" in taken.result().stderr
    assert nvtx.result().stdout.split("|")[2] == f"{tmp_path}/libcupti.so.13"
    assert other.result().stdout.endswith("|nobody|/nonexistent\n")


# ---- armed programs


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("armed") / "armed"
    subprocess.run(["gcc", "-O1", "-pthread", "-o", built, Path(__file__).with_name("armed.c"), "-ldl"], check=True)
    return str(built)


@pytest.mark.parametrize("what", ["fork", "exec", "storm"])
def test_an_armed_program_forks_execs_and_takes_signals_as_ever(program: str, fakegpu: Path, what: str) -> None:
    environment = {**os.environ, **arm.arm({}).changes, "LD_LIBRARY_PATH": str(fakegpu)}
    done = subprocess.run([program, what], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.kernel
@pytest.mark.parametrize("what", ["fork", "exec", "storm"])
def test_a_traced_program_does_too(run: Run, program: str, fakegpu: Path, what: str) -> None:
    done = run("--", program, what, LD_LIBRARY_PATH=str(fakegpu))
    assert done.returncode == 0, done.stdout + done.stderr
