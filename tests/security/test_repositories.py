"""Repositories above a program: whoever may write to a folder above it puts no words into a job's rows, has nobody
wait, and has nothing read for a process that it may not read itself."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.capture.process import environment, mapped, pytorch
from argus.capture.process.mapped import Mapping, device_of
from argus.capture.reader.reader import Reader
from argus.system.proc import Rights
from tests.security.mapping_process import AS_NOBODY
from tests.security.test_file_systems import file_system
from tests.security.test_reader import made  # noqa: F401

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="acts for several users")
COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "1" * 40
HONEST = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups")


@contextlib.contextmanager
def working_in(folder: Path, user: tuple[str, ...], command: tuple[str, ...] = ("sleep", "600")) -> Iterator[int]:
    """A process that works in a folder, by its PID."""
    with subprocess.Popen([*user, *command], stdin=subprocess.PIPE, cwd=folder) as process:
        try:
            while Path(f"/proc/{process.pid}/comm").read_text() != f"{command[0]}\n":
                time.sleep(0.01)
            yield process.pid
        finally:
            process.kill()


def as_nobody(command: str) -> None:
    subprocess.run([*AS_NOBODY, "sh", "-c", command], check=True)


@pytest.fixture
def shared(folder: Path) -> Path:
    """A folder that everybody may write to, as /tmp, with one of root's below."""
    folder.chmod(0o1777)
    (folder / "job").mkdir(mode=0o755)
    return folder


@AS_ROOT
@pytest.mark.parametrize(
    "made_by_others",
    [
        f"mkdir .git; echo {OTHER} > .git/HEAD",
        'echo "gitdir: $PWD/x" > .git; mkdir x; echo "ref: refs/heads/x" > x/HEAD; printf "a\\0b" > x/commondir',
        f"mkdir evil; echo {OTHER} > evil/HEAD; ln -s $PWD/evil .git",
        "mkfifo .git",
        "mkdir -p .git; mkfifo .git/HEAD",
        "mkdir .git; ln -s HEAD .git/HEAD",
    ],
)
def test_a_repository_of_somebody_else_above_a_job_is_none(shared: Path, made_by_others: str) -> None:
    """Its commit was stored as the job's, and one with a NUL in a name cost the job all its readings."""
    as_nobody(f"cd {shared} && {made_by_others}")
    for user in (HONEST, ()):
        with working_in(shared / "job", user) as pid:
            facts = environment.process_facts(pid)
            assert "git.commit" not in facts
            assert environment.UNREADABLE not in facts
    with working_in(shared, AS_NOBODY) as pid:
        environment.process_facts(pid)  # his own: whatever it says


@AS_ROOT
@pytest.mark.parametrize("owner", [0, 1000])
def test_the_repository_of_a_job_or_of_root_is_one_in_a_shared_folder(shared: Path, owner: int) -> None:
    git = shared / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n")
    for path in (git, git / "HEAD"):
        os.chown(path, owner, owner)
    with working_in(shared / "job", HONEST) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT


@AS_ROOT
def test_whose_folder_a_program_runs_in_is_believed(shared: Path) -> None:
    """As of a container whose root runs what lies in a user's folder."""
    git = shared / "job" / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n")
    for path in (shared / "job", git, git / "HEAD"):
        os.chown(path, 1000, 1000)
    with working_in(shared / "job", ()) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT
        (git / "HEAD").unlink()
        secret = shared / "secret"
        secret.write_text(f"{OTHER}\n")
        secret.chmod(0o600)
        (git / "HEAD").symlink_to(secret)
        os.lchown(git / "HEAD", 1000, 1000)
        assert "git.commit" not in environment.process_facts(pid), "that user may not read it"


@AS_ROOT
@pytest.mark.parametrize("mode", ["file", "folder", "group"])
@pytest.mark.parametrize("what", ["HEAD", "packed-refs", "refs/heads/main", "commondir"])
def test_a_link_to_a_file_that_a_process_may_not_read_is_not_followed(shared: Path, mode: str, what: str) -> None:
    """A secret of root's, 40 digits, was stored as a commit."""
    secrets = shared / "secrets"
    (secrets / "refs/heads").mkdir(parents=True)
    if what == "packed-refs":
        (secrets / "secret").write_text(f"{OTHER} refs/heads/main\n")
    else:
        (secrets / "secret").write_text(f"{OTHER}\n")
    (secrets / "refs/heads/main").write_text(f"{OTHER}\n")
    for path in (secrets / "secret", secrets / "refs/heads/main"):
        path.chmod({"file": 0o600, "folder": 0o644, "group": 0o640}[mode])
    secrets.chmod(0o700 if mode == "folder" else 0o755)
    if what == "commondir":
        commands = f"echo 'gitdir: {shared}/x/own' > .git; mkdir own; cd own"
        commands += f"; echo 'ref: refs/heads/main' > HEAD; echo {secrets} > commondir"
    else:
        head = "" if what == "HEAD" else "echo 'ref: refs/heads/main' > .git/HEAD;"
        commands = f"mkdir -p .git/refs/heads; {head} ln -s {secrets}/secret .git/{what}"
    as_nobody(f"mkdir {shared}/x && cd {shared}/x && {commands}")
    with working_in(shared / "x", AS_NOBODY) as pid:
        assert "git.commit" not in environment.process_facts(pid)
        for path in (secrets, secrets / "refs", secrets / "refs/heads"):
            path.chmod(0o755)
        for path in (secrets / "secret", secrets / "refs/heads/main"):
            path.chmod(0o644)
        assert environment.process_facts(pid)["git.commit"] == OTHER, "what it may read is read"


@AS_ROOT
def test_a_version_that_a_process_may_not_read_is_none(shared: Path) -> None:
    """Of PyTorch beside a library, for which a link may stand."""
    version = shared / "secret"
    version.write_text("__version__ = '2.9.0'\n")
    version.chmod(0o600)
    place = shared / "x/torch"
    as_nobody(f"mkdir -p {place}/lib && touch {place}/lib/libtorch_cpu.so && ln -s {version} {place}/version.py")
    with working_in(shared / "job", AS_NOBODY) as pid:
        status = (place / "lib/libtorch_cpu.so").stat()
        device, path = device_of(status.st_dev), str(place / "lib/libtorch_cpu.so")
        library = Mapping(0, 0, 0, device, status.st_ino, path, deleted=False)
        assert pytorch.layout_of(pid, library) is None
        version.chmod(0o644)
        assert pytorch.layout_of(pid, library) is not None


@AS_ROOT
def test_a_link_of_somebody_else_above_a_job_has_nobody_wait(
    made: Reader,  # noqa: F811
    shared: Path,
    tmp_path: Path,
) -> None:
    """It led to a file system that does not answer: the loop waited for each process of the job, and that was called
    the job's own."""
    where = shared / "fs"
    (tmp_path / "git").write_text("gitdir: /x\n")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(file_system(where, tmp_path / "git"))
        stack.callback(daemon.kill)
        as_nobody(f"ln -s {where}/git {shared}/.git")
        honest = [stack.enter_context(working_in(shared / "job", HONEST)) for _ in range(3)]
        daemon.send_signal(signal.SIGSTOP)
        for pid in honest:
            assert environment.UNREADABLE not in environment.read_facts(pid)
        assert made.counters["file_systems_hung"] == made.counters["reader_restarts"] == 0


@AS_ROOT
def test_a_repository_on_another_mount_is_not_looked_for(
    made: Reader,  # noqa: F811
    shared: Path,
    tmp_path: Path,
) -> None:
    """Whoever may write to a folder above a job's mounts one there that does not answer."""
    (tmp_path / "HEAD").write_text(f"{OTHER}\n")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(file_system(shared / ".git", tmp_path / "HEAD"))
        stack.callback(daemon.kill)
        pid = stack.enter_context(working_in(shared / "job", HONEST))
        daemon.send_signal(signal.SIGSTOP)
        facts = environment.read_facts(pid)
        assert "git.commit" not in facts
        assert environment.UNREADABLE not in facts
        assert made.counters["file_systems_hung"] == made.counters["reader_restarts"] == 0


@AS_ROOT
def test_a_folder_of_a_script_that_others_made_since_is_not_believed(shared: Path) -> None:
    """A program that was started by a relative path works elsewhere by now, or its folder was removed: who may write
    there makes one of that name."""
    as_nobody(f"mkdir -p {shared}/sub/.git && echo {OTHER} > {shared}/sub/.git/HEAD")
    words = ["bash", "-c", f"cd {shared}; read line", "sub/train.py"]
    with subprocess.Popen([*HONEST, *words], stdin=subprocess.PIPE, cwd="/") as process:
        try:
            while os.readlink(f"/proc/{process.pid}/cwd") != str(shared):
                time.sleep(0.01)
            assert "git.commit" not in environment.process_facts(process.pid)
        finally:
            process.kill()
    with working_in(shared / "job", HONEST) as pid:
        (shared / "job").rmdir()
        as_nobody(f"mkdir -p '{shared}/job (deleted)/.git' && echo {OTHER} > '{shared}/job (deleted)/.git/HEAD'")
        assert os.readlink(f"/proc/{pid}/cwd") == f"{shared}/job (deleted)"
        assert "git.commit" not in environment.process_facts(pid)


@AS_ROOT
def test_a_folder_of_a_script_that_is_a_link_of_others_has_nobody_wait(
    made: Reader,  # noqa: F811
    shared: Path,
    tmp_path: Path,
) -> None:
    where = shared / "fs"
    (tmp_path / "git").write_text("gitdir: /x\n")
    words = ["bash", "-c", f"cd {shared}; read line", "sub/train.py"]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(file_system(where, tmp_path / "git"))
        stack.callback(daemon.kill)
        as_nobody(f"ln -s {where} {shared}/sub")
        process = stack.enter_context(subprocess.Popen([*HONEST, *words], stdin=subprocess.PIPE, cwd="/"))
        stack.callback(process.kill)
        while os.readlink(f"/proc/{process.pid}/cwd") != str(shared):
            time.sleep(0.01)
        daemon.send_signal(signal.SIGSTOP)
        assert environment.UNREADABLE not in environment.read_facts(process.pid)
        assert made.counters["file_systems_hung"] == made.counters["reader_restarts"] == 0


@AS_ROOT
def test_a_repository_on_another_mount_is_none_whatever_it_is_called(shared: Path) -> None:
    """Blanks are escaped in the table of mounts."""
    job = shared / "my project" / "job"
    job.mkdir(parents=True)
    git = shared / "my project" / ".git"
    git.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "x", str(git)], check=True)
    try:
        (git / "HEAD").write_text(OTHER)
        with working_in(job, HONEST) as pid:
            assert "git.commit" not in environment.process_facts(pid)
    finally:
        subprocess.run(["umount", str(git)], check=True)


@AS_ROOT
def test_what_may_not_be_read_of_a_repository_makes_no_other_commit(shared: Path) -> None:
    """An old commit of packed-refs, or that of a repository around it, was stored."""
    outer, inner = shared / "job" / ".git", shared / "job" / "inner" / ".git"
    for git, commit in ((outer, "b" * 40), (inner, "c" * 40)):
        (git / "refs/heads").mkdir(parents=True)
        (git / "HEAD").write_text("ref: refs/heads/main\n")
        (git / "refs/heads/main").write_text(f"{commit}\n")
        (git / "packed-refs").write_text(f"{'a' * 40} refs/heads/main\n")
    with working_in(shared / "job" / "inner", HONEST) as pid:
        assert environment.process_facts(pid)["git.commit"] == "c" * 40
        (inner / "refs/heads/main").chmod(0o600)
        facts = environment.process_facts(pid)
        assert "git.commit" not in facts
        assert facts[environment.UNREADABLE] == "git.commit"
        os.chown(inner / "refs/heads/main", 1000, 1000)
        os.chown(inner / "HEAD", 2000, 2000)
        assert "git.commit" not in environment.process_facts(pid)


@AS_ROOT
@pytest.mark.parametrize("how", ["hard link", "written by all"])
def test_a_file_that_others_may_have_chosen_is_not_read(shared: Path, how: str) -> None:
    git = shared / "job" / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n")
    with working_in(shared / "job", HONEST) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT
        if how == "hard link":
            os.link(git / "HEAD", shared / "other")
        else:
            (git / "HEAD").chmod(0o666)
        assert "git.commit" not in environment.process_facts(pid)


@AS_ROOT
def test_of_who_has_mounted_too_much_nothing_is_looked_for(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a namespace of one's own one may mount a hundred thousand."""
    (shared / "job" / ".git").mkdir()
    (shared / "job" / ".git/HEAD").write_text(f"{COMMIT}\n")
    where = shared / "job" / "mounted"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "x", str(where)], check=True)
    try:
        (where / ".git").mkdir()
        (where / ".git/HEAD").write_text(f"{OTHER}\n")
        with working_in(where, HONEST) as pid:
            size = len(Path(f"/proc/{pid}/mountinfo").read_bytes())
            monkeypatch.setattr(mapped, "MOUNTS_BYTES", size + 1)
            assert environment.process_facts(pid)["git.commit"] == OTHER
            monkeypatch.setattr(mapped, "MOUNTS_BYTES", size // 2)
            facts = environment.process_facts(pid)
            assert "git.commit" not in facts
            assert facts[environment.UNREADABLE] == "git.commit"
        with working_in(shared / "job", HONEST) as pid:
            assert environment.process_facts(pid)["git.commit"] == COMMIT, "of root's own mount nothing is asked"
    finally:
        subprocess.run(["umount", str(where)], check=True)


@AS_ROOT
def test_a_project_of_a_group_has_its_commit(shared: Path) -> None:
    """Its folder is a colleague's, open to the group alone; root's program in a user's folder below one of root's."""
    job = shared / "job"
    (job / ".git").mkdir()
    (job / ".git/HEAD").write_text(f"{COMMIT}\n")
    for path in (job, job / ".git", job / ".git/HEAD"):
        os.chown(path, 1001, 2000)
        path.chmod(0o750 if path.is_dir() else 0o640)
    member = ("setpriv", "--reuid=1000", "--regid=1000", "--groups=2000")
    with working_in(job, member) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT
    os.chown(shared, 0, 0)
    shared.chmod(0o700)
    with working_in(job, ()) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT


@AS_ROOT
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "is_read"),
    [
        (7, 1, 0o400, True),
        (7, 1, 0o044, False),
        (1, 8, 0o040, True),
        (1, 8, 0o004, False),
        (1, 1, 0o044, True),
        (1, 1, 0o004, False),  # it may be in that group
        (1, 1, 0o440, False),
        (0, 0, 0o600, False),
    ],
)
def test_the_bits_of_a_file_s_owner_its_group_or_others_count(
    folder: Path, uid: int, gid: int, mode: int, is_read: bool
) -> None:
    rights = Rights(frozenset({7}), frozenset({8}), frozenset({0, 7}))
    assert may(rights, made_as(folder / "file", uid, gid, mode)) == (is_read, True)
    assert may(rights, made_as(folder / "folder", uid, gid, (mode & 0o444) >> 2))[1] is is_read
    assert not may(Rights(frozenset({7, 9}), frozenset(), frozenset()), made_as(folder / "one", 7, 1, 0o400))[0]
    assert may(Rights(frozenset({0}), frozenset(), frozenset()), made_as(folder / "none", 7, 1, 0))[0]


def made_as(path: Path, uid: int, gid: int, mode: int) -> Path:
    path.mkdir() if path.name == "folder" else path.touch()
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def may(rights: Rights, path: Path) -> tuple[bool, bool]:
    """Whether what lies there may be read, and gone through."""
    fd = os.open(path, os.O_PATH)
    try:
        status = os.fstat(fd)
        return rights.may_read(fd, status), rights.may_pass(fd, status)
    finally:
        os.close(fd)


def put_list(path: Path, *entries: tuple[int, int, int]) -> None:
    """Gives a file an access list. Entries (include/uapi/linux/posix_acl_xattr.h): kind (1 owner, 2 a user, 4 its
    group, 8 a group, 16 mask, 32 others), bits, number."""
    listed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", listed)
    except OSError as failure:
        if failure.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("no lists of access on this file system")


@AS_ROOT
@pytest.mark.parametrize("where", [".git", ".git/HEAD"])
def test_whom_a_list_of_access_forbids_a_repository_has_none_of_it(shared: Path, where: str) -> None:
    git = shared / "job" / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n")
    put_list(shared / "job" / where, (1, 7, -1), (2, 0, 1000), (4, 5, -1), (16, 5, -1), (32, 5, -1))
    with working_in(shared / "job", HONEST) as pid:
        assert "git.commit" not in environment.process_facts(pid)
    put_list(shared / "job" / where, (1, 7, -1), (2, 5, 1000), (4, 0, -1), (16, 5, -1), (32, 0, -1))
    with working_in(shared / "job", HONEST) as pid:
        assert environment.process_facts(pid)["git.commit"] == COMMIT


def kernel_says(path: Path, user: int, groups: list[int], wanted: int) -> bool:
    """Whether a process of a user, in these groups, may do that to what lies there."""
    child = os.fork()
    if not child:
        try:
            os.setgroups(groups)
            os.setresgid(groups[0], groups[0], groups[0])
            os.setresuid(user, user, user)
            os._exit(not os.access(path, wanted))
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != 2
    return code == 0


@AS_ROOT
def test_what_is_allowed_is_what_the_kernel_allows(folder: Path) -> None:
    """Drawn owners, modes and lists of access: nothing more is ever allowed, and what is certain is not refused."""
    draw = random.Random(20)
    folder.chmod(0o755)
    path = folder / "folder"
    path.mkdir()
    allowed = 0
    for _ in range(400):
        with contextlib.suppress(OSError):
            os.removexattr(path, "system.posix_acl_access")
        os.chown(path, draw.choice((0, 1000, 1001)), draw.choice((0, 2000, 2001)))
        path.chmod(draw.randrange(0o1000))
        users, groups = list[int](), list[int]()
        if draw.random() < 0.8:
            users = draw.sample((1000, 1001), draw.randrange(3))
            groups = draw.sample((2000, 2001, 2002), draw.randrange(4))
            put_list(
                path,
                (1, draw.randrange(8), -1),
                *((2, draw.randrange(8), user) for user in sorted(users)),
                (4, draw.randrange(8), -1),
                *((8, draw.randrange(8), group) for group in sorted(groups)),
                (16, draw.randrange(8), -1),
                (32, draw.randrange(8), -1),
            )
        member = draw.sample((2000, 2001, 2002, 2003), draw.randrange(1, 4))
        rights = Rights(frozenset({1000}), frozenset(member), frozenset({0, 1000}))
        for wanted, found in zip((os.R_OK | os.X_OK, os.X_OK), may(rights, path), strict=True):
            real = kernel_says(path, 1000, member, wanted)
            assert real or not found, (path.stat(), member, wanted)
            status = path.stat()
            certain = 1000 in users or {status.st_gid, *groups} & {*member}
            # Linux does not look at a list whose mask is 0 (fs/namei.c, acl_permission_check).
            if status.st_uid == 1000 or (certain and status.st_mode & 0o070):
                assert real == found, (status, member, wanted)
            allowed += found
    assert allowed > 100
