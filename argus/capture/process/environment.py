"""What a process runs with: settings of its libraries, their versions, its limits, the commit of its program.

All of it is what the process, or whoever started it, wrote: names of files, a few variables, two short files. It is
read by the reader process, and nothing of it is run.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from argus.capture.process import mapped
from argus.capture.reader import progress, reader
from argus.capture.reader.reader import Answer, Malformed, text
from argus.model.environment import LONGEST, MOST, UNREADABLE, bounded
from argus.system.proc import Rights, field_of, read_file
from argus.system.settings import settings

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = {"cgroup.cpu_max": "cpu.max", "cgroup.memory_max": "memory.max"}
_FIRST_LIMITS = {
    "cpu": ("cgroup.cpu_max", "cpu.cfs_quota_us"), "memory": ("cgroup.memory_max", "memory.limit_in_bytes"),
}  # fmt: skip
"""Files of limits in control groups of version 2, and, by controller, of version 1."""
_MAPS_BYTES = 4 << 20
"""Of /proc/PID/maps: some 30,000 mappings."""
_FILE_BYTES = 8192
"""Of a file beside the program: what is looked for stands at its begin."""
_MEMORY_BYTES = 2 << 20
"""Of /proc/PID/environ and cmdline: a process may make them as long as its memory, an exec at most 2 MB in all."""
_FOLDERS_UP = 8
"""A program lies at most so deep in its repository."""
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+_-]{0,40}")
_IN_TORCH = re.compile(r"(/.{1,4000}/torch)/lib/libtorch[\w]*\.so")
_TORCH_VERSION = re.compile(r"^__version__ = ['\"]([^'\"\n]{1,60})['\"]", re.MULTILINE)
_BY_NAME = {
    "gpu.driver": re.compile(r"/libcuda\.so\.(\d{3,4}\.[\d.]{1,20})"),
    "gpu.cuda": re.compile(r"/libcudart\.so\.(\d{1,3}\.[\d.]{1,20})"),
    "nccl.version": re.compile(r"/libnccl\.so\.(\d{1,3}\.[\d.]{1,20})"),
    "python.version": re.compile(r"/(?:lib)?python(\d\.\d{1,3})(?:\.so[\d.]*)?$"),
}
"""Versions that names of mapped files have."""
_BY_PACKAGE = {
    "nccl.version": ("/nvidia/nccl/lib/", re.compile(r"nvidia_nccl_cu\d+-([\w.+]{1,40})\.dist-info")),
    "gpu.cuda": ("/nvidia/cuda_runtime/lib/", re.compile(r"nvidia_cuda_runtime_cu\d+-([\w.+]{1,40})\.dist-info")),
    "cudnn.version": ("/nvidia/cudnn/lib/", re.compile(r"nvidia_cudnn_cu\d+-([\w.+]{1,40})\.dist-info")),
}
"""Versions that names of Python packages have, which lie two folders above a mapped file's."""
_INTERPRETER = re.compile(r"(?:python|pypy|bash|dash|sh|zsh|perl|ruby|node)[\d.]*t?$")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF = re.compile(r"ref: (refs/[\w./+-]{1,200})")
_GIT = ".git"
_GIT_DIR = re.compile(r"gitdir: ([^\0\n]{1,4000})\n?")
"""What is in ``.git`` of a submodule or a further work tree (gitrepository-layout(5))."""
_RANGE = re.compile("[0-9a-f]{1,16}-[0-9a-f]{1,16}")
_INODE = re.compile("[0-9]{1,20}")
_DELETED = " (deleted)"
_CONTAINER = re.compile(r"[0-9a-f]{64}")


def read_facts(pid: int) -> dict[str, str]:
    """Facts of a process, by the reader if there is one. What could not be read is named in ``unreadable``.

    Raises:
        OSError: The process has ended, may not be looked at, or does not answer.
    """
    if not reader.shared.on:
        return process_facts(pid)
    if not reader.shared.reads_memory(pid):
        raise reader.Unreadable(f"the memory of process {pid} does not answer")

    def parse(answer: Answer) -> dict[str, str]:
        facts = answer.what["facts"]
        if not isinstance(facts, dict) or len(facts) > MOST:
            raise Malformed("facts")
        return bounded({text(name, LONGEST): text(value, LONGEST + 1) for name, value in facts.items()})

    return reader.checked(reader.shared.ask("facts", pid), parse)  # type: ignore[no-any-return]


def process_facts(pid: int) -> dict[str, str]:
    """The same, read by this process.

    Raises:
        OSError: The process has ended, or may not be looked at.
    """
    facts: dict[str, str] = {}
    unreadable: list[str] = []
    progress.memory()
    environment = _begin(pid, "environ", _MEMORY_BYTES)
    progress.clear()
    facts |= settings(_variables(environment))
    if len(environment) == _MEMORY_BYTES:
        unreadable.append("settings")
    facts |= _binding(pid)
    with _noting(unreadable, "cgroup"):
        facts |= _limits(read_file(f"{PROC}/{pid}/cgroup").decode(errors="replace"), unreadable)
    with _noting(unreadable, "versions"):
        facts |= _versions(pid, unreadable)
    with _noting(unreadable, "git.commit"):
        if commit := _commit(pid):
            facts["git.commit"] = commit
    if unreadable:
        facts[UNREADABLE] = ",".join(unreadable)
    return bounded(facts)


@contextlib.contextmanager
def _noting(unreadable: list[str], what: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except (OSError, ValueError):  # a name with a NUL
        unreadable.append(what)


def _variables(environment: bytes) -> Iterator[tuple[str, str]]:
    """Variables of an environment as /proc/PID/environ has it."""
    for item in environment.split(b"\0"):
        name, equals, value = item[: 8 * LONGEST].partition(b"=")
        if equals:
            yield name.decode(errors="replace"), value.decode(errors="replace")


def _binding(pid: int) -> dict[str, str]:
    """The CPUs and memory nodes that its main thread may use."""
    status = read_file(f"{PROC}/{pid}/status")
    named = {"numa.cpus": b"Cpus_allowed_list", "numa.memory": b"Mems_allowed_list"}
    return {fact: value.decode(errors="replace") for fact, name in named.items() if (value := field_of(status, name))}


def _limits(cgroup: str, unreadable: list[str]) -> dict[str, str]:
    """CPU and memory that its control group, or one above it, allows; and its container. A limit whose group is not
    shown here is not known, and named in ``unreadable``."""
    facts = {}
    if container := _CONTAINER.search(cgroup):
        facts["container.id"] = container[0][:12]
    places: dict[str, tuple[Path, str, str]] = {}
    for line in filter(None, cgroup.split("\n", 64)[:64]):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for fact, file in _LIMITS.items():
                places.setdefault(fact, (CGROUPS, file, path))
        for kind, (fact, file) in _FIRST_LIMITS.items():
            if kind in controllers.split(","):  # where version 1 has it, version 2 has it not
                places[fact] = (CGROUPS / kind, file, path)
    for fact, (root, file, path) in places.items():
        try:
            if (value := _limit(root, path, file)) is not None:
                facts[fact] = value
        except OSError:
            unreadable.append(fact)
    return facts


def _limit(root: Path, path: str, file: str) -> str | None:
    """The nearest limit; None: there is none.

    Raises:
        OSError: The group, or a file of it, is not shown here.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not root.joinpath(*parts).is_dir():
        raise FileNotFoundError(path)  # above what this namespace shows, or mounted elsewhere
    for depth in range(min(len(parts), 32), -1, -1):
        try:
            value = root.joinpath(*parts[:depth], file).read_text()[:80].strip()
        except FileNotFoundError:
            continue
        unlimited = value.startswith(("max", "-1")) or (value.isdigit() and int(value) >= 1 << 60)
        if not unlimited:
            return value
    return None


def _versions(pid: int, unreadable: list[str]) -> dict[str, str]:
    """Versions of what it maps, by the names of files and packages; of PyTorch from its own version.py."""
    files = _mapped_files(pid)
    paths = list(files)
    with contextlib.suppress(OSError):
        paths.append(os.readlink(PROC / str(pid) / "exe"))
    facts = {}
    for fact, pattern in _BY_NAME.items():
        if found := next((match for path in paths if (match := pattern.search(path))), None):
            facts[fact] = found[1].rstrip(".")
    torch = next(((match[1], file) for path, file in files.items() if (match := _IN_TORCH.match(path))), None)
    packages = {
        fact: (path.partition(place)[0], files[path], pattern)
        for fact, (place, pattern) in _BY_PACKAGE.items()
        if (path := next((path for path in files if place in path), None)) is not None
    }
    if torch is None and not packages:
        return facts
    with _noting(unreadable, "versions"), mapped.FileTree(pid) as tree:
        if torch is not None:
            with _passing_over():  # what names say is known all the same
                tree.check_still_there(torch[1])
                if found := _TORCH_VERSION.search(_head(tree.file(f"{torch[0]}/version.py"))):
                    facts["torch.version"] = found[1]
        for fact, (folder, mapping, pattern) in packages.items():
            with _passing_over():
                tree.check_still_there(mapping)
                named = (match for name in sorted(tree.names(folder)) if (match := pattern.fullmatch(name)))
                if match := next(named, None):
                    facts[fact] = match[1]
    return facts


def _mapped_files(pid: int) -> dict[str, mapped.Mapping]:
    """Files that a process maps, by path: of each its first mapping, whose offset is left out."""
    progress.memory()
    lines = _begin(pid, "maps", _MAPS_BYTES).decode(errors="surrogateescape").split("\n")
    progress.clear()
    files: dict[str, mapped.Mapping] = {}
    for line in lines:
        words = line.split(None, 5)
        if len(words) == 6 and words[5].startswith("/") and _INODE.fullmatch(words[4]) and _RANGE.fullmatch(words[0]):
            path = words[5].removesuffix(_DELETED)
            begin, _, end = words[0].partition("-")
            one = mapped.Mapping(
                int(begin, 16), int(end, 16), 0, words[3], int(words[4]), path, deleted=path != words[5]
            )
            files.setdefault(path, one)
    return files


@contextlib.contextmanager
def _passing_over():  # type: ignore[no-untyped-def]
    """What is not there, or not for the process to read."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError, mapped.Refused):
        yield


def _commit(pid: int) -> str:
    """The commit that is checked out where its program lies, or where it was started; empty: there is none. A
    repository on another mount than that folder is none: git does not look there, either, and whoever may write to a
    folder above may mount one there.

    Raises:
        OSError: There is a repository, and it cannot be read, or the process may not read it.
    """
    with mapped.FileTree(pid) as root:
        for tree, start in _folders(pid, root):
            folder = start.path
            for _ in range(_FOLDERS_UP):
                git = f"{folder.rstrip('/')}/{_GIT}"
                try:
                    tree.place(git, owned=_GIT, on=start.mount)
                    return _Repository(tree).checked_out(git)
                except (FileNotFoundError, NotADirectoryError):
                    pass  # it is no repository; one around it may be
                except mapped.Elsewhere:
                    break  # git does not look further, either
                except mapped.Foreign:
                    if _is_kept(tree.place(folder).status, tree.rights):
                        raise  # nobody but those who are believed may have put it there
                if folder == "/":
                    break
                folder = posixpath.dirname(folder)
    return ""


def _is_kept(folder: os.stat_result, rights: Rights) -> bool:
    """Whether nobody but who is believed may put anything into a folder."""
    return folder.st_uid in rights.owners and not folder.st_mode & 0o022


class _Repository:
    """What the files of a repository say that may lie above a program: of those that are owned by who is believed, and
    that the process may read. Others may write to a folder above the program's, such as /tmp.

    Args:
        tree: The process's.
    """

    def __init__(self, tree: mapped.FileTree) -> None:
        self._tree = tree
        self._chosen = False
        """Whether guests may have chosen where it is."""

    def checked_out(self, git: str) -> str:
        """The commit of a repository; empty: it is not known. Raises FileNotFoundError or NotADirectoryError if there
        is none, another OSError if it cannot be read."""
        own, common = self._folders(git)
        try:
            head = self._read(f"{own}/HEAD").strip()
        except FileNotFoundError:
            if own == git:
                raise
            return ""  # it is elsewhere; a repository around this one is another
        if _COMMIT.fullmatch(head):
            return head
        if not (ref := _REF.fullmatch(head)) or ".." in ref[1]:
            return ""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            commit = self._read(f"{common}/{ref[1]}").strip()
            return commit if _COMMIT.fullmatch(commit) else ""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for line in self._read(f"{common}/packed-refs", 1 << 20).split("\n"):
                commit, _, name = line.partition(" ")
                if name == ref[1] and _COMMIT.fullmatch(commit):
                    return commit
        return ""

    def _folders(self, git: str) -> tuple[str, str]:
        """Where HEAD of a repository is, and where its refs are: ``.git`` itself, or what the file ``.git`` names."""
        try:
            found = _GIT_DIR.fullmatch(self._read(git))
        except mapped.Irregular:
            return git, git  # a folder, as of most repositories
        if found is None:
            return git, git
        self._chosen = True
        own = posixpath.join(posixpath.dirname(git), found[1])
        try:
            common = self._read(f"{own}/commondir").strip()
        except (FileNotFoundError, NotADirectoryError):
            return own, own
        return own, own if "\0" in common else posixpath.join(own, common)

    def _read(self, path: str, size: int = _FILE_BYTES) -> str:
        return _head(self._tree.file(path, owned=_GIT, chosen=self._chosen), size)


def _folders(pid: int, tree: mapped.FileTree) -> Iterator[tuple[mapped.FileTree, mapped.Place]]:
    """Where its program may lie, with who is believed there: the folder of the script that its command line names,
    where it works, and the folder of a program that is no interpreter. Whoever owns one of the last two is believed, if
    it is still what lies there: what a path or a name leads to by now, others may have put there."""
    progress.memory()
    words = _begin(pid, "cmdline", 65536).split(b"\0")
    progress.clear()
    script = next((os.fsdecode(word) for word in words[:64] if word.endswith((b".py", b".sh"))), None)
    if script is not None:
        works = os.readlink(PROC / str(pid) / "cwd")
        with _passing_over():
            if (path := posixpath.join(works, script)).startswith("/"):
                yield tree, tree.place(posixpath.dirname(path), owned=_GIT)
    with _passing_over():
        if (place := tree.link("cwd")) is not None:
            yield tree.believing(place.status.st_uid), place
    if not _INTERPRETER.match(posixpath.basename(os.readlink(PROC / str(pid) / "exe"))):
        with _passing_over():
            if (place := tree.link("exe")) is not None:
                believing = tree.believing(place.above.st_uid)
                yield believing, believing.place(posixpath.dirname(place.path))


def _begin(pid: int, name: str, size: int) -> bytes:
    """The begin of a file of /proc/PID."""
    with (PROC / str(pid) / name).open("rb") as file:
        return file.read(size)


def _head(file: mapped.File, size: int = _FILE_BYTES) -> str:
    return file.read(size, 0).decode(errors="replace")
