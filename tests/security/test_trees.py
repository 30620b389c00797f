"""Files beside what a process runs, by paths that it or others chose: mounts, folders, lists of access on the way."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argus.capture.process import environment, mapped
from argus.capture.reader import process as reader_process
from argus.capture.reader.reader import Answer, Reader
from argus.system import files
from tests.security.mapping_process import NOBODY, mapping
from tests.security.test_file_systems import file_system
from tests.security.test_reader import HERE, made  # noqa: F401 - a fixture
from tests.security.test_repositories import AS_ROOT, COMMIT, HONEST, OTHER, as_nobody, put_list, shared, working_in  # noqa: F401

pytestmark = AS_ROOT


def mounted_by_nobody(
    where: Path, shown: Path, folder: Path
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A file system of another user's, which shows one file and says that it is root's."""
    server = folder / "server.py"
    server.write_text((HERE / "fuse_folder.py").read_text().replace("user_id=0", f"user_id={NOBODY}"))
    return file_system(where, shown, server=server)


def running_script(script: str, cwd: Path | str = "/") -> contextlib.AbstractContextManager[int]:
    return working_in(Path(cwd), HONEST, ("bash", "-c", "read line", script))


def test_what_a_list_of_access_forbids_the_reader_process_does_not_read_either(
    made: Reader,  # noqa: F811
    shared: Path,  # noqa: F811
) -> None:
    """It may not ask for one more thing than it is allowed to: then no file seemed to have a list."""
    git = shared / "job" / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n")
    with working_in(shared / "job", HONEST) as pid:
        assert environment.read_facts(pid)["git.commit"] == COMMIT
        put_list(git / "HEAD", (1, 6, -1), (2, 0, 1000), (4, 4, -1), (16, 4, -1), (32, 4, -1))
        facts = environment.read_facts(pid)
        assert "git.commit" not in facts
        assert facts[environment.UNREADABLE] == "git.commit"
        put_list(git / "HEAD", (1, 6, -1), (2, 4, 1000), (4, 0, -1), (16, 4, -1), (32, 0, -1))
        assert environment.read_facts(pid)["git.commit"] == COMMIT


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.parametrize("how", ["two slashes", "gitdir"])
def test_a_file_system_of_somebody_else_forges_no_commit_and_has_nobody_wait(
    made: Reader,  # noqa: F811
    shared: Path,  # noqa: F811
    tmp_path: Path,
    how: str,
    is_dead: bool,
) -> None:
    (tmp_path / "HEAD").write_text(f"{OTHER}\n")
    where = shared / (".git" if how == "two slashes" else "gone")
    if how == "gitdir":
        (shared / "job/.git").write_text(f"gitdir: {where}\n")
        os.chown(shared / "job/.git", 1000, 1000)
    where.mkdir()
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(mounted_by_nobody(where, tmp_path / "HEAD", tmp_path))
        pid = stack.enter_context(running_script(f"/{shared}/job/train.py", shared / "job"))
        if is_dead:
            daemon.send_signal(signal.SIGSTOP)
        assert "git.commit" not in environment.read_facts(pid)
        assert made.counters["file_systems_hung"] == made.counters["reader_restarts"] == 0


def test_a_commit_is_not_that_of_another_mount_put_there_meanwhile(
    shared: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mounts were compared before anything was opened."""
    git = shared / ".git"
    git.mkdir()
    real = mapped.Mounts.enter

    def enter(self: mapped.Mounts, fd: int, owners: frozenset[int]) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(shared) and not os.path.ismount(git):
            subprocess.run(["mount", "-t", "tmpfs", "x", str(git)], check=True)
            (git / "HEAD").write_text(OTHER)
        real(self, fd, owners)

    monkeypatch.setattr(mapped.Mounts, "enter", enter)
    try:
        with working_in(shared / "job", HONEST) as pid:
            assert "git.commit" not in environment.process_facts(pid)
            assert os.path.ismount(git)
    finally:
        subprocess.run(["umount", str(git)], check=True)


@pytest.mark.parametrize("what", ["gitdir", "commondir"])
def test_a_guest_leads_through_no_folder_that_he_may_not_pass(shared: Path, what: str) -> None:  # noqa: F811
    """Root's process works in his folder. He led by a name in a file where a link of his was refused."""
    private = shared / "job" / "private"
    (private / "r/refs/heads").mkdir(parents=True)
    (private / "r/HEAD").write_text("ref: refs/heads/main\n")
    (private / "r/refs/heads/main").write_text(COMMIT)
    if what == "gitdir":
        command = f"echo 'gitdir: {private}/r' > .git"
    else:
        command = f"echo 'gitdir: {shared}/x/w' > .git; mkdir w; echo {private}/r > w/commondir"
        command += "; echo 'ref: refs/heads/main' > w/HEAD"
    as_nobody(f"mkdir {shared}/x && cd {shared}/x && {command}")
    with working_in(shared / "x", ()) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT, "what he may read is read"
        private.chmod(0o700)
        assert "git.commit" not in environment.process_facts(pid)


@pytest.fixture
def torch(shared: Path) -> Iterator[Path]:  # noqa: F811
    """A folder with a PyTorch that a process has mapped."""
    library = shared / "env/torch/lib/libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\0" * 4096)
    (shared / "env/torch/version.py").write_text("__version__ = '2.9.0'\n")
    for path in (shared / "env", *(shared / "env").rglob("*")):
        os.chown(path, 1000, 1000)
    return shared / "env/torch"


def test_a_version_beside_a_library_that_was_removed_is_not_believed(torch: Path) -> None:
    """Who made a folder of that name since said which version a job runs."""
    with mapping([torch / "lib/libtorch_cpu.so"], list(HONEST)) as pid:
        assert environment.process_facts(pid)["torch.version"] == "2.9.0"
        os.link(torch / "lib/libtorch_cpu.so", kept := torch.parents[1] / "kept")
        (torch / "lib/libtorch_cpu.so").unlink()
        os.link(kept, torch / "lib/libtorch_cpu.so")
        assert "torch.version" not in environment.process_facts(pid), "it was removed, and came back"
        shutil.rmtree(torch.parent)
        as_nobody(f"mkdir -p {torch}/lib && touch {torch}/lib/libtorch_cpu.so")
        as_nobody(f"echo \"__version__ = '6.6.6'\" > {torch}/version.py")
        assert "torch.version" not in environment.process_facts(pid)


@pytest.mark.parametrize("how", ["missing", "forbidden"])
def test_what_names_say_is_known_where_a_version_cannot_be_read(torch: Path, how: str) -> None:
    runtime = torch / "lib/libcudart.so.12.4.1"
    shutil.copy(torch / "lib/libtorch_cpu.so", runtime)
    if how == "missing":
        (torch / "version.py").unlink()
    else:
        os.chown(torch / "version.py", 0, 0)
        (torch / "version.py").chmod(0o600)
    with mapping([torch / "lib/libtorch_cpu.so", runtime], list(HONEST)) as pid:
        facts = environment.process_facts(pid)
    assert facts["gpu.cuda"] == "12.4.1"
    assert not {"torch.version", environment.UNREADABLE} & facts.keys()


def test_a_script_below_a_link_has_the_commit_of_where_it_is(shared: Path) -> None:  # noqa: F811
    """The repository above the link, that of someone's dotfiles, was taken for it."""
    (home := shared / "job/home").mkdir()
    (home / ".git").mkdir()
    (home / ".git/HEAD").write_text(OTHER)
    (data := shared / "job/data/src").mkdir(parents=True)
    (home / "src").symlink_to("../data/src")
    (data / "train.py").touch()
    (git := shared / "job/data/.git").mkdir()
    (git / "HEAD").write_text(COMMIT)
    with running_script(f"{home}/src/train.py") as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT
    (git / "HEAD").unlink()
    (git / "modules").mkdir()
    (git / "modules/HEAD").write_text(COMMIT)
    (data / ".git").write_text("gitdir: ../.git/modules\n")
    with running_script(f"{home}/src/train.py") as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT


@pytest.mark.parametrize("owner", [0, 2000])
def test_a_repository_that_may_not_be_read_hides_the_one_around_it(shared: Path, owner: int) -> None:  # noqa: F811
    """The outer one's commit was stored."""
    outer, inner = shared / "job/.git", shared / "job/inner/.git"
    for git, commit in ((outer, OTHER), (inner, COMMIT)):
        git.mkdir(parents=True)
        (git / "HEAD").write_text(commit)
    with working_in(shared / "job/inner", HONEST) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT
        os.chown(inner, owner, owner)
        inner.chmod(0o755 if owner else 0o700)
        facts = environment.process_facts(pid)
    assert "git.commit" not in facts
    assert facts[environment.UNREADABLE] == "git.commit"


def test_a_repository_on_another_mount_leaves_the_one_where_a_program_works(shared: Path) -> None:  # noqa: F811
    """A volume with a script, mounted in the work tree of another repository: no commit was known at all."""
    volume = shared / "job/w/data"
    volume.mkdir(parents=True)
    (works := shared / "job/works").mkdir()
    for git, commit in ((shared / "job/w/.git", OTHER), (works / ".git", COMMIT)):
        git.mkdir()
        (git / "HEAD").write_text(commit)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "x", str(volume)], check=True)
    try:
        (volume / "train.py").touch()
        with running_script(f"{volume}/train.py", works) as pid:
            assert environment.process_facts(pid)["git.commit"] == COMMIT
        with running_script(f"{volume}/train.py", volume) as pid:
            assert not {"git.commit", environment.UNREADABLE} & environment.process_facts(pid).keys()
    finally:
        subprocess.run(["umount", str(volume)], check=True)


def test_a_mount_that_came_while_a_path_was_followed_is_known(
    shared: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an automounter's, which mounts what is gone through."""
    volumes = [shared / "job/a", shared / "job/a/b"]
    real = mapped.Mounts.enter

    def enter(self: mapped.Mounts, fd: int, owners: frozenset[int]) -> None:
        real(self, fd, owners)
        if os.readlink(f"/proc/self/fd/{fd}") == str(volumes[0]) and not os.path.ismount(volumes[1]):
            mount(volumes[1])
            (volumes[1] / ".git").mkdir()
            (volumes[1] / ".git/HEAD").write_text(COMMIT)
            (volumes[1] / "train.py").touch()

    def mount(where: Path) -> None:
        where.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "x", str(where)], check=True)

    mount(volumes[0])
    monkeypatch.setattr(mapped.Mounts, "enter", enter)
    try:
        with running_script(f"{volumes[1]}/train.py") as pid:
            assert environment.process_facts(pid)["git.commit"] == COMMIT
    finally:
        subprocess.run(["umount", "-R", str(volumes[0])], check=True)


def test_a_library_of_an_overlay_is_known_by_what_is_mapped(torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some overlays show another inode in maps than the file has."""
    monkeypatch.setattr(mapped, "_is_mapped", lambda *_: False)
    with mapping([torch / "lib/libtorch_cpu.so"], list(HONEST)) as pid:
        assert environment.process_facts(pid)["torch.version"] == "2.9.0"


def test_a_folder_whose_status_cannot_be_asked_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    root = os.open(tmp_path, os.O_PATH)
    before, asked = len(os.listdir("/proc/self/fd")), 0
    fstat = os.fstat

    def refuse(fd: int) -> os.stat_result:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise OSError(errno.EIO, "no")
        return fstat(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", refuse)
        with pytest.raises(OSError, match="no"):
            files.find(root, "/a")
    assert asked == 2
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(root)


def test_a_file_whose_status_cannot_be_asked_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system in user space that refused had the reader process run out of them."""
    (tmp_path / "file").write_text("x")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with monkeypatch.context() as patch:

        def refuse(_: int) -> os.stat_result:
            raise OSError(errno.EIO, "no")

        patch.setattr(os, "fstat", refuse)
        with pytest.raises(OSError, match="no"):
            mapped.File(fd)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_a_reader_without_descriptors_makes_room_for_another(
    made: Reader,  # noqa: F811
    shared: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answered nobody any more, and was kept."""
    (shared / "job/.git").mkdir()
    (shared / "job/.git/HEAD").write_text(COMMIT)
    exchange = made._exchange

    def without(*words: Any) -> Answer:
        answer = exchange(*words)
        assert answer.what["full"] is False
        answer.what["full"] = True
        return answer

    with working_in(shared / "job", HONEST) as pid:
        with monkeypatch.context() as patch:
            patch.setattr(made, "_exchange", without)
            assert environment.read_facts(pid)["git.commit"] == COMMIT
        assert environment.read_facts(pid)["git.commit"] == COMMIT
        assert made.reads(pid)
    assert made.counters["reader_restarts"] == 1


def test_a_reader_without_descriptors_says_so() -> None:
    mine, its = socket.socketpair(socket.AF_UNIX)
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    with mine, its:
        one = reader_process._Reader(its, 100.0)
        assert one._has_room()
        resource.setrlimit(resource.RLIMIT_NOFILE, (its.fileno(), kept[1]))
        try:
            assert not one._has_room()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, kept)
