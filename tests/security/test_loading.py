"""What Argus has a traced process load: nothing that another user may change."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from argus.capture.process import cupti, mapped
from argus.capture.reader import left_out
from argus.cupti import build
from argus.cupti.collector import Collector, CollectorState
from argus.system import proc
from tests.security.mapping_process import NOBODY, mapping, needs_root

pytestmark = needs_root()
VICTIM = 1234
AS_VICTIM = ("setpriv", f"--reuid={VICTIM}", f"--regid={VICTIM}", "--clear-groups")
NAME = "libcupti.so.12"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder for all users, as /tmp is."""
    path = Path(tempfile.mkdtemp(prefix="argus-loading-"))
    path.chmod(0o1777)
    left_out.take()
    yield path
    subprocess.run(["umount", "--lazy", path / "mine" / "lib64"], capture_output=True)
    shutil.rmtree(path, ignore_errors=True)


def give(path: Path, uid: int, top: Path) -> None:
    """A file or folder, with those above it up to ``top``, belongs to a user."""
    while path != top:
        os.chown(path, uid, uid, follow_symlinks=False)
        path = path.parent


def place(file: Path, uid: int, top: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"library")
    give(file, uid, top)
    return file


def found(pid: int, below: Path) -> list[str]:
    return [path for path in cupti.candidates(pid) if path.startswith(str(below))]


def _of_attacker(lib: Path, top: Path) -> Path:
    return place(top / "extras" / "CUPTI" / "lib64" / NAME, NOBODY, top)


def _of_root(lib: Path, top: Path) -> Path:
    return place(top / "extras" / "CUPTI" / "lib64" / NAME, 0, top)


def _own(lib: Path, top: Path) -> Path:
    return place(lib / NAME, VICTIM, top)


def _writable(lib: Path, top: Path) -> Path:
    file = place(lib / NAME, VICTIM, top)
    file.chmod(0o666)
    return file


def _in_group_s_folder(lib: Path, top: Path) -> Path:
    file = place(lib / NAME, VICTIM, top)
    os.chown(lib, VICTIM, NOBODY)
    lib.chmod(0o775)
    return file


def _in_folder_of_own_group(lib: Path, top: Path) -> Path:
    """As a umask of 002 leaves it, where each user has a group."""
    file = place(lib / NAME, VICTIM, top)
    lib.chmod(0o775)
    return file


def _behind_a_link_of_attacker(lib: Path, top: Path) -> Path:
    place(lib / "real" / "lib64" / NAME, VICTIM, top)
    (top / "extras").mkdir()
    (top / "extras" / "CUPTI").symlink_to(lib / "real")
    os.chown(top / "extras" / "CUPTI", NOBODY, NOBODY, follow_symlinks=False)
    return top / "extras" / "CUPTI" / "lib64" / NAME


@pytest.mark.parametrize(
    ("make", "offered"),
    [
        (_own, True),
        (_of_root, True),
        (_of_attacker, False),
        (_writable, False),
        (_in_group_s_folder, False),
        (_in_folder_of_own_group, True),
        (_behind_a_link_of_attacker, False),
    ],
)
def test_a_library_that_others_may_change_is_not_offered(
    shared: Path, make: Callable[[Path, Path], Path], offered: bool
) -> None:
    """A program in a folder right below /tmp: "extras" beside it was anybody's to make, and its CUPTI ran in it."""
    lib = shared / "mine"
    runtime = place(lib / "libcudart.so.12", VICTIM, shared)
    file = make(lib, shared)
    with mapping([runtime], AS_VICTIM) as pid:
        assert (str(file) in found(pid, shared)) is offered
        found(pid, shared)
        counted = [("cupti_libraries_refused", pid, 1)]
        assert left_out.take() == ([] if offered else counted)


def test_a_name_that_the_loader_reads_as_another_is_not_offered(shared: Path) -> None:
    runtime = place(shared / "$ORIGIN" / "libcudart.so.12", VICTIM, shared)
    place(shared / "$ORIGIN" / NAME, VICTIM, shared)
    with mapping([runtime], AS_VICTIM) as pid:
        assert found(pid, shared) == []
        assert left_out.take() == [("cupti_libraries_refused", pid, 1)]


def test_root_of_a_user_namespace_counts_as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nUid:\t101000\t101000\t101000\t101000\n")
    (tmp_path / "7" / "uid_map").write_text("         0     100000      65536\n     70000       5000          1\n")
    assert proc.masters_of(7) == (0, 101000, 100000)
    assert proc.masters_of(8) == (0,)


@pytest.mark.parametrize(("uid", "offered"), [(NOBODY, False), (VICTIM, True), (0, True)])
def test_a_file_system_of_another_user_is_not_believed(shared: Path, uid: int, offered: bool) -> None:
    """It says that its files are root's."""
    runtime = place(shared / "mine" / "bin" / "libcudart.so.12", VICTIM, shared)
    where = shared / "mine" / "lib64"
    where.mkdir()
    library = place(shared / "behind" / NAME, 0, shared)
    server = (Path(__file__).parent / "fuse_folder.py").read_text()
    (shared / "server.py").write_text(server.replace("user_id=0", f"user_id={uid}"))
    command = [sys.executable, str(shared / "server.py"), str(where), str(library)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"mounted\n":
            pytest.skip("no file system in user space can be mounted here")
        with mapping([runtime], AS_VICTIM) as pid:
            refused = pytest.raises(PermissionError, match="others may change it")
            with mapped.FileTree(pid) as tree, contextlib.nullcontext() if offered else refused:
                tree.check_unchangeable(str(where / NAME))
    finally:
        subprocess.run(["umount", "--lazy", where], check=False)
        process.kill()
        process.communicate()


VICTIM_S = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
ctypes.CDLL(sys.argv[2]).InitializeInjection()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_process_loads_nothing_of_another_user_s(shared: Path) -> None:
    source = "#include <fcntl.h>\n__attribute__((constructor)) static void run(void) { open(%s, O_CREAT, 0600); }"
    evil = _of_attacker(shared / "mine", shared)
    runtime = place(shared / "mine" / "libcudart.so.12", VICTIM, shared)
    for file, code in ((evil, source % f'"{shared}/ran"'), (runtime, "int cudaLaunchKernel(void) { return 0; }")):
        words = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
        subprocess.run(words, input=code.encode(), check=True)
        file.chmod(stat.S_IMODE(file.stat().st_mode) | 0o555)
    helper = shared / "helper.so"
    shutil.copy(build.library(), helper)
    helper.chmod(0o755)
    command = [*AS_VICTIM, "/usr/bin/python3", "-I", "-S", "-c", VICTIM_S, str(runtime), str(helper)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    one = None
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        one = Collector(process.pid)
        end = time.monotonic() + 20
        while time.monotonic() < end and one.state is not CollectorState.FAILED:
            one.poll(time.monotonic())
            time.sleep(0.02)
        assert one.state is CollectorState.FAILED  # it has been through all that was offered
        assert not (shared / "ran").exists()
    finally:
        if one is not None:
            one.close()
        process.kill()
        process.communicate()
