"""CUPTI in a process: where its library may be, where the helper's memory is mapped, and the names that records of
kernels point at. Where there is a reader process, that one looks. Imports no numpy."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path

from argus.capture.process.mapped import FileTree, Refused, mount_of
from argus.capture.reader import left_out, progress, reader
from argus.capture.reader.reader import Answer, Malformed, integers, text
from argus.system.files import Untrusted

MEMFD = "argus-cupti"
"""The helper's memory, as memfd_create(2) calls it."""
MAX_TEXT_BYTES = 4096
"""Of a name that a record points at."""
_PAGE_BYTES = 4096
_MOST_POINTERS = 1024
"""Names that are asked for at once."""
_DRIVER_OF_CUDA_13 = 580
_MOST_NAMES, _MOST_IN_ALL = 1 << 14, 1 << 16
"""Names of a folder that are read, and of all folders of a process: it may have made a folder of millions."""
_MOST_FOLDERS, _MOST_ALIKE = 64, 16
"""Folders that its mappings name, and those that one part of a pattern fits."""
_MOST_CHECKED = 64
"""Paths that are followed to see who may change what lies there: few of them fit into the helper's memory."""
_CUPTI = re.compile(r"libcupti\.so\.(1[2-9])$")
_RUNTIME = re.compile(r"lib(?:cudart|cublas|nvrtc)[^/]*\.so\.(\d+)")
_DRIVER = re.compile(r"libcuda\.so\.(\d+)\.")
_BESIDE = re.compile(r"lib(cudart|cublas|cublasLt|nvrtc|cudnn|nccl|torch|torch_cuda|c10_cuda|jaxlib)\b[^/]*\.so")
_SYSTEM = (
    "usr/local/cuda*/extras/CUPTI/lib64",
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/targets/*/lib",
    "usr/local/cuda*/lib",
    "usr/lib/*-linux-gnu",
    "opt/conda/lib",
)


def candidates(pid: int) -> list[str]:
    """Where CUPTI may be, as the process sees it, best first: mapped already, beside its CUDA, the system's.

    Only files that exist, that nobody may change who could not change the process anyway, and only of the major version
    of the process's CUDA where that is known.
    """
    if reader.shared.on:
        try:
            return reader.checked(reader.shared.ask("cupti", pid), _paths)  # type: ignore[no-any-return]
        except OSError:
            return []
    paths = mapped_paths(pid)
    majors = _majors(paths)
    paths_found: list[str] = [path for path in paths if Path(path).name.startswith("libcupti.so")]
    folders: dict[str, None] = {}
    for path in sorted(paths, key=lambda path: not Path(path).name.startswith("libcudart")):
        if len(folders) >= _MOST_FOLDERS:
            break
        if not _BESIDE.match(Path(path).name):
            continue
        folder = Path(path).parent
        folders[str(folder)] = None
        folders[str(folder.parent / "extras" / "CUPTI" / "lib64")] = None
        # Wheels: site-packages/nvidia/<part>/lib, site-packages/torch/lib.
        for above in folder.parents:
            packages = above if above.name == "nvidia" else above / "nvidia"
            if above.name in ("nvidia", "site-packages", "dist-packages"):
                for part in ("cu13", "cuda_cupti"):
                    folders[str(packages / part / "lib")] = None
    with contextlib.suppress(OSError), FileTree(pid) as tree:
        left = _MOST_IN_ALL

        def names(folder: str) -> list[str]:
            nonlocal left
            inside = tree.names(folder, min(_MOST_NAMES, left))
            left -= len(inside)
            return inside

        for folder_name in folders:
            paths_found += _cuptis(folder_name, names(folder_name))
        for pattern in _SYSTEM:
            for folder_name in _folders_like(pattern, names):
                paths_found += _cuptis(folder_name, names(folder_name))
        fitting = [path for path in dict.fromkeys(paths_found) if _fits(path, majors)]
        return [path for path in fitting[:_MOST_CHECKED] if _may_be_loaded(pid, tree, path)]
    return []


def _fits(path: str, majors: set[int]) -> bool:
    version = _CUPTI.search(path)
    return not version or not majors or int(version[1]) in majors


def _may_be_loaded(pid: int, tree: FileTree, path: str) -> bool:
    """Whether no other user can have the process load what he likes under this name, now or later."""
    try:
        # The loader would put other text in the place of $ORIGIN and its like: another path than the one looked at.
        if "$" in path:
            raise Untrusted(path, "the loader would read its name as another")
        tree.check_unchangeable(path)
    except Untrusted:
        left_out.count_once("cupti_libraries_refused", pid, path)
        return False
    except OSError:
        return False
    return True


def _paths(answer: Answer) -> list[str]:
    return [text(path, 1 << 13) for path in answer.what["paths"][:_MOST_IN_ALL]]


def _majors(paths: Iterable[str]) -> set[int]:
    """Major versions of CUPTI that fit the process's CUDA; empty: not known."""
    names = [Path(path).name for path in paths]
    runtime = {int(match[1]) for name in names if (match := _RUNTIME.match(name))}
    if runtime:
        return runtime
    driver = [int(match[1]) for name in names if (match := _DRIVER.match(name))]
    return {12} if driver and max(driver) < _DRIVER_OF_CUDA_13 else set()


def _folders_like(pattern: str, names: Callable[[str], list[str]]) -> list[str]:
    """Paths that a pattern with stars fits, newest version first. Those without a star may not exist.

    Args:
        pattern: Relative to the root folder.
        names: What lies in a folder of the process.
    """
    folders = [""]
    for part in pattern.split("/"):
        if "*" in part:
            alike = {folder: fnmatch.filter(names(folder or "/"), part) for folder in folders}
            folders = [
                f"{folder}/{name}" for folder in folders for name in sorted(alike[folder], reverse=True)[:_MOST_ALIKE]
            ]
        else:
            folders = [f"{folder}/{part}" for folder in folders]
    return folders


def _cuptis(folder: str, names: list[str]) -> list[str]:
    """CUPTI's libraries among what lies in a folder of the process, newest first."""
    versions = sorted(((int(match[1]), name) for name in names if (match := _CUPTI.match(name))), reverse=True)
    return [f"{folder}/{name}" for _, name in versions]


def mapped_paths(pid: int) -> list[str]:
    """Files that a process maps, each once."""
    try:
        raw = reader.maps(pid)
    except OSError:
        return []
    paths: dict[bytes, None] = {}
    for line in raw.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(b"/"):
            paths[fields[5]] = None
    return [os.fsdecode(path) for path in paths if not path.endswith(b" (deleted)")]


# ---- the helper's memory


def helper_mapping(pid: int) -> str:
    """Where a process maps the beginning of the helper's memory, as map_files calls it; empty: nowhere, so it is not
    armed.

    Raises:
        OSError: The process ended, or may not be looked at.
    """
    device = memory_device()
    for line in reader.maps(pid).split(b"\n"):
        # Names of files can hold anything, and a process may have a file system for its root, which lets who opens the
        # file wait for ever: only the kernel's own files in memory are of that device.
        words = line.split(None, 5)
        named = len(words) == 6 and words[5].removesuffix(b" (deleted)") == f"/memfd:{MEMFD}".encode()
        if named and words[3] == device and int(words[2], 16) == 0:
            return words[0].decode()
    return ""


def open_helper(pid: int, where: str = "") -> tuple[str, int]:
    """Where a process maps the helper's memory, and what lies there, not opened (O_PATH): it may be another file by
    now, so ``is_memory`` has to be asked.

    Args:
        pid: The process.
        where: What ``helper_mapping`` found before; empty: the process's mappings are read.

    Returns:
        As ``helper_mapping``, and a descriptor; -1: there is nothing.

    Raises:
        OSError: The process ended, or may not be looked at.
    """
    if reader.shared.on:
        return reader.checked(reader.shared.ask("helper", pid, where=where), _place)  # type: ignore[no-any-return]
    where = where or helper_mapping(pid)
    if not where:
        return "", -1
    progress.memory()
    return where, os.open(f"/proc/{pid}/map_files/{where}", os.O_PATH | os.O_CLOEXEC)


def read_helper(pid: int, where: str, size: int) -> bytes:
    """The first ``size`` bytes of the helper's memory, as it is at this instant.

    Args:
        pid: The process.
        where: What ``helper_mapping`` found.
        size: Bytes.

    Raises:
        OSError: The process ended, may not be looked at, or does not answer.
    """
    if reader.shared.on:
        if not reader.shared.reads_memory(pid):
            raise reader.Unreadable(f"the memory of process {pid} does not answer")
        answer = reader.shared.ask("helper_memory", pid, where=where, size=size)
        answer.close()
        return answer.data
    progress.memory()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(int(where.split("-")[0], 16))
        return memory.read(size)


def _place(answer: Answer) -> tuple[str, int]:
    where = text(answer.what["where"], 64)
    if bool(where) != bool(answer.fds):
        raise Malformed("a place without a descriptor")
    return where, answer.fds.pop(0) if where else -1


def is_memory(place: int) -> bool:
    """Whether a descriptor is one of a file in memory (memfd). No file system is asked: it might not answer."""
    return mount_of(place) == _memory_mount()


def open_memory(place: int) -> int:
    """Opens the file in memory that an O_PATH descriptor leads to.

    Raises:
        Refused: It is another file.
        OSError: It cannot be opened.
    """
    if not is_memory(place):
        raise Refused("it is no file in memory")
    # The process may hold a lease on it, whose end would be waited for.
    return os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


@lru_cache(maxsize=1)
def _memory_mount() -> int:
    file = os.memfd_create("argus")
    try:
        return mount_of(file)
    finally:
        os.close(file)


@lru_cache(maxsize=1)
def memory_device() -> bytes:
    """The device of every file in memory (memfd), as /proc/PID/maps has it."""
    file = os.memfd_create("argus")
    try:
        device = os.fstat(file).st_dev
    finally:
        os.close(file)
    return b"%02x:%02x" % (os.major(device), os.minor(device))


# ---- names


class Texts:
    """Texts in a process's memory. Opened once: it stays with the program that runs now, also beyond an exec.

    Raises:
        OSError: Its memory may not be read.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def at(self, pointers: Sequence[int]) -> list[bytes | None]:
        """The text at each address, up to its end or ``MAX_TEXT_BYTES``; None: there is nothing to read. Waits for the
        memory."""
        progress.memory()
        return [self._at(pointer) for pointer in pointers]

    def _at(self, pointer: int) -> bytes | None:
        text = b""
        while len(text) < MAX_TEXT_BYTES:
            at = pointer + len(text)
            try:
                part = os.pread(self._fd, _PAGE_BYTES - at % _PAGE_BYTES, at)
            except (OSError, OverflowError):
                part = b""
            if not part:
                return None
            end = part.find(0)
            if end >= 0:
                return text + part[:end]
            text += part
        return text[:MAX_TEXT_BYTES]

    def close(self) -> None:
        os.close(self._fd)


class RemoteTexts:
    """As ``Texts``, which is in the reader; nothing can be read any more once that does not answer.

    Raises:
        OSError: Its memory may not be read.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._key = next(_keys)
        reader.shared.ask("texts", pid, key=self._key, pointers=[]).close()

    def at(self, pointers: Sequence[int]) -> list[bytes | None]:
        """As ``Texts.at``."""
        found: list[bytes | None] = []
        for begin in range(0, len(pointers), _MOST_POINTERS):
            some = list(pointers[begin : begin + _MOST_POINTERS])
            try:
                if not reader.shared.reads_memory(self._pid):
                    raise reader.Unreadable("its memory does not answer")
                answer = reader.shared.ask("texts", self._pid, key=self._key, pointers=some)
                found += reader.checked(answer, partial(_texts, len(some)))
            except OSError:
                found += [None] * len(some)
        return found

    def close(self) -> None:
        """Lets go of the memory."""
        with contextlib.suppress(OSError):
            if reader.shared.on:
                reader.shared.ask("texts", self._pid, key=self._key, pointers=None).close()


_keys = itertools.count(1)


def _texts(count: int, answer: Answer) -> list[bytes | None]:
    sizes, at = [size + 1 for size in answer.what["sizes"]], 0
    if len(integers(sizes, MAX_TEXT_BYTES + 2)) != count:
        raise Malformed("texts")
    found: list[bytes | None] = []
    for size in sizes:
        found.append(answer.data[at : at + size - 1] if size else None)
        at += max(size - 1, 0)
    return found


def texts_of(pid: int) -> Texts | RemoteTexts:
    """Texts in a process's memory, which the reader process reads where there is one.

    Raises:
        OSError: Its memory may not be read.
    """
    return RemoteTexts(pid) if reader.shared.on else Texts(pid)
