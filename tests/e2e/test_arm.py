"""Arming: what is set for whom, the .pth file in real interpreters, and who is seen to be armed."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from argus.capture.process import cupti
from argus.cli.main import main
from argus.cupti import arm, build
from argus.model.errors import ArgusError

ARMED = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
if sys.argv[2] == "start":
    library.InitializeInjection(); library.InitializeInjection()
print("ready", flush=True)
sys.stdin.read()
"""


# ---- the environment


def test_an_environment_is_armed_with_the_helper() -> None:
    armed = arm.arm({})
    assert (armed.state, dict(armed.changes)) == ("on", {arm.VARIABLE: str(build.library())})
    waiting = arm.arm({}, wait_ms=700)
    assert waiting.changes[arm.WAIT_VARIABLE] == "700"
    assert arm.WAIT_VARIABLE not in arm.arm({arm.WAIT_VARIABLE: "5"}, wait_ms=700).changes


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({arm.SWITCH: "0"}, "off: ARGUS_CUPTI=0 is set"),
        ({arm.VARIABLE: "/opt/nsys/libToolsInjection64.so"},
         "off: CUDA_INJECTION64_PATH is taken by /opt/nsys/libToolsInjection64.so"),
    ],
)  # fmt: skip
def test_what_the_user_set_stays(environment: dict[str, str], state: str) -> None:
    armed = arm.arm(environment, wait_ms=700)
    assert (armed.state, dict(armed.changes), armed.on) == (state, {}, False)


def test_a_copy_of_the_helper_that_is_set_already_counts_as_armed() -> None:
    armed = arm.arm({arm.VARIABLE: "/shared/libargus_cupti.so"})
    assert (armed.state, dict(armed.changes)) == ("on", {})


def test_without_the_helper_nothing_is_armed_and_the_way_to_get_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    assert arm.arm({}).state.startswith("off: the CUPTI helper is not compiled")
    with pytest.raises(ArgusError, match=r"argus\.cupti\.build"):
        build.library()


@pytest.mark.parametrize("folder", ["plain", "with space", "quo'te", 'dou"ble', "dol$lar", "ünï"])
def test_the_setting_survives_a_shell(tmp_path: Path, folder: str) -> None:
    path = arm.copy_to(tmp_path / folder)
    done = subprocess.run(
        ["sh", "-c", f'{arm.export_text(path)}; printf %s "${arm.VARIABLE}"'], capture_output=True, check=True
    )
    assert os.fsdecode(done.stdout) == str(path)
    assert json.loads(arm.export_text(path, "json")) == {arm.VARIABLE: str(path)}
    assert str(path) == json.loads(arm.export_text(path, "k8s").split("value: ")[1])


def test_a_copy_replaces_and_never_overwrites(tmp_path: Path) -> None:
    first = arm.copy_to(tmp_path)
    inode = first.stat().st_ino
    assert arm.copy_to(tmp_path) == first
    assert first.stat().st_ino != inode, "processes run in the old file"
    assert first.read_bytes() == build.library().read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [build.LIBRARY]
    assert first.stat().st_mode & 0o777 == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(ArgusError, match="cannot be copied"):
        arm.copy_to(tmp_path / "file")


# ---- an interpreter


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter of the test's own."""
    venv.create(tmp_path / "a venv", with_pip=False)
    return str(tmp_path / "a venv" / "bin" / "python")


def variable(python: str, *words: str, **environment: str) -> str:
    """What a program of that interpreter has in its environment, as C code sees it."""
    code = (
        f"import ctypes; get = ctypes.CDLL(None).getenv; get.restype = ctypes.c_char_p; print(get(b'{arm.VARIABLE}'))"
    )
    plain = {name: value for name, value in os.environ.items() if name not in (arm.VARIABLE, arm.SWITCH)}
    done = subprocess.run(
        [python, *words, "-c", code], capture_output=True, text=True, check=True, env={**plain, **environment}
    )
    assert done.stderr == ""
    output = done.stdout.strip()
    return "" if output == "None" else output[2:-1]


def test_an_interpreter_is_armed_and_disarmed(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert variable(python) == ""
    assert main(["arm", "--python", python]) == 0
    assert main(["arm", "--python", python]) == 0
    assert variable(python) == str(build.library())
    assert variable(python, "-I") == str(build.library())
    assert variable(python, "-S") == ""
    assert variable(python, **{arm.SWITCH: "0"}) == ""
    assert variable(python, **{arm.VARIABLE: "/theirs.so"}) == "/theirs.so"
    assert main(["arm", "--python", python, "--remove"]) == 0
    assert variable(python) == ""
    assert main(["arm", "--python", python, "--remove"]) == 0
    assert "was not armed" in capsys.readouterr().out


def test_an_armed_interpreter_goes_on_when_the_helper_is_gone(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = arm.copy_to(tmp_path / "it's here")
    monkeypatch.setattr(build, "PACKAGE", copied.parent)
    place = arm.arm_interpreter(python)
    assert variable(python) == str(copied)
    shutil.rmtree(copied.parent)
    assert variable(python) == ""
    assert place.read_text().count("\n") == 1


@pytest.mark.parametrize("program", ["/bin/true", "/bin/false", "/no/such/python"])
def test_what_is_no_interpreter_is_not_armed(program: str) -> None:
    with pytest.raises(ArgusError, match=r"interpreter|not a supported Python"):
        arm.arm_interpreter(program)


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arm", "--remove"]) == 2
    assert main(["arm", "--pid", "1"]) == 2
    assert main(["arm", "--status", "--copy-to", "/tmp"]) == 2
    assert main(["arm", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {arm.VARIABLE: str(build.library())}


# ---- who is armed


@pytest.mark.parametrize(
    ("words", "environment", "armed"),
    [
        (["start"], {}, True),
        (["load"], {}, False),
        (["start"], {arm.SWITCH: "0"}, False),
    ],
)
def test_only_a_process_that_started_the_helper_is_armed(
    words: list[str], environment: dict[str, str], armed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ARMED, str(build.library()), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = [entry.state for entry in arm.armed_processes([process.pid])]
        assert found == (["DORMANT"] if armed else [])
        assert main(["arm", "--status", "--pid", str(process.pid)]) == 0
        assert ("DORMANT" in capsys.readouterr().out) is armed
        assert (process.pid in [entry.pid for entry in arm.armed_processes()]) is armed
        threads = len(os.listdir(f"/proc/{process.pid}/task"))
        assert threads == (2 if armed else 1), "a second start makes no second thread"
        process.communicate()
    assert process.returncode == 0


def test_who_reads_a_process_is_not_armed() -> None:
    """`argus trace` maps the memory of the helpers that it reads."""
    with subprocess.Popen(
        [sys.executable, "-c", ARMED, str(build.library()), "start"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        _, place = cupti.open_helper(process.pid)
        fd = cupti.open_memory(place)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        with mmap.mmap(fd, mmap.PAGESIZE):
            assert cupti.helper_mapping(os.getpid())
            assert [entry.pid for entry in arm.armed_processes([os.getpid(), process.pid])] == [process.pid]
        os.close(fd)
        os.close(place)
        process.communicate()


def test_a_file_that_looks_like_the_helpers_memory_is_distinguished(tmp_path: Path) -> None:
    code = (
        "import mmap, os; f = os.memfd_create('argus-cupti'); os.ftruncate(f, 4096); m = mmap.mmap(f, 4096); "
        "print('ready', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (found,) = arm.armed_processes([process.pid])
        assert found.state.startswith("unknown: ")
        process.communicate("\n")


def test_cupti_is_looked_for_where_the_command_would_find_it(tmp_path: Path) -> None:
    wheel = tmp_path / "venv/lib/python3.12/site-packages/nvidia/cuda_cupti/lib"
    for folder in (wheel, tmp_path / "bin", tmp_path / "home/extras/CUPTI/lib64", tmp_path / "venv/bin"):
        folder.mkdir(parents=True)
    program = tmp_path / "venv/bin/python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "home/extras/CUPTI/lib64/libcupti.so.13").touch()
    environment = {"CUDA_HOME": str(tmp_path / "home")}
    assert arm.find_cupti(environment, [str(program)]) == tmp_path / "home/extras/CUPTI/lib64/libcupti.so.13"
    (wheel / "libcupti.so.12").touch()
    assert arm.find_cupti(environment, [str(program)]) == wheel / "libcupti.so.12"
