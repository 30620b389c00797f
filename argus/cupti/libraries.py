"""Where CUPTI may be in a process: what it has mapped, and what lies beside that."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from argus.capture.process.mapped import names_in_root, open_root
from argus.capture.process.targets import PROC
from argus.cupti import shared

_DRIVER_OF_CUDA_13 = 580
_MOST_NAMES, _MOST_IN_ALL = 1 << 14, 1 << 16
"""Names of a folder that are read, and of all folders of a process: it may have made a folder of millions."""
_MOST_FOLDERS, _MOST_ALIKE = 64, 16
"""Folders that its mappings name, and those that one part of a pattern fits."""
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

    Only files that exist, and only of the major version of the process's CUDA where that is known.
    """
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
    with contextlib.suppress(OSError):
        root = open_root(pid)
        left = _MOST_IN_ALL

        def names(folder: str) -> list[str]:
            nonlocal left
            inside = names_in_root(root, folder, min(_MOST_NAMES, left))
            left -= len(inside)
            return inside

        try:
            for folder_name in folders:
                paths_found += _cuptis(folder_name, names(folder_name))
            for pattern in _SYSTEM:
                for folder_name in _folders_like(pattern, names):
                    paths_found += _cuptis(folder_name, names(folder_name))
        finally:
            os.close(root)
    chosen = []
    for path in dict.fromkeys(paths_found):
        version = _CUPTI.search(path)
        if not version or not majors or int(version[1]) in majors:
            chosen.append(path)
    return chosen


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
        raw = (PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return []
    paths: dict[bytes, None] = {}
    for line in raw.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(b"/"):
            paths[fields[5]] = None
    return [os.fsdecode(path) for path in paths if not path.endswith(b" (deleted)")]


def candidate_lines(paths: Iterable[str]) -> bytes:
    """As the helper wants them: one a line, as many as fit."""
    lines = b""
    for path in paths:
        line = os.fsencode(path)
        if b"\n" not in line and len(lines) + len(line) + 2 <= shared.CANDIDATES_BYTES:
            lines += line + b"\n"
    return lines
