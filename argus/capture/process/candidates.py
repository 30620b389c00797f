"""Running programs that somebody may want to trace: those that train first, then other Python that uses the CPU."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from argus.capture.process.targets import (
    PROC,
    Identity,
    ancestors,
    boot_time,
    cpu_ns,
    executable_mappings,
    identify,
    is_argus,
    parent_of,
    processes,
    read_command,
    read_environment,
    runs_python,
    start_ticks,
)
from argus.system.proc import read_cgroup

SAMPLED_S = 0.25
"""For so long CPU time is measured."""
BUSY_CPU = 0.1
"""A Python program that is neither on a GPU nor a rank nor has PyTorch counts from this share of a core on."""
MAX_OTHERS = 10
"""Of those the busiest."""


@dataclass(frozen=True)
class Candidate:
    """One process.

    Attributes:
        pid, parent: Its process id, and its parent's.
        identity: Rank and job, as its launcher's environment says.
        user: Whom it belongs to.
        words: Its command line.
        on_gpu: It maps libcuda.
        torch: It maps PyTorch.
        python: Its executable is a Python.
        cpu: CPU time by time, 1 for a core; -1: not known.
        age_s: Since it was started, seconds.
    """

    pid: int
    parent: int
    identity: Identity
    user: str
    words: tuple[str, ...]
    on_gpu: bool
    torch: bool
    python: bool
    cpu: float = -1.0
    age_s: float = 0.0

    @property
    def trains(self) -> bool:
        """Whether it is likely a training process."""
        return self.on_gpu or self.torch or self.identity.rank >= 0


def find_candidates(sleep: Callable[[float], None] = time.sleep) -> list[Candidate]:
    """The processes of this machine that may be worth tracing, as :func:`ranked` orders them."""
    own = {os.getpid(), *ancestors(os.getpid())}
    candidates = [candidate for pid in processes() if pid not in own and (candidate := _inspect(pid)) is not None]
    before, began = {one.pid: cpu_ns(one.pid) for one in candidates}, time.monotonic()
    sleep(SAMPLED_S)
    took_ns = max((time.monotonic() - began) * 1e9, 1.0)
    measured = []
    for one in candidates:
        now = cpu_ns(one.pid)
        was_measured = now >= 0 and before[one.pid] >= 0
        measured.append(replace(one, cpu=(now - before[one.pid]) / took_ns if was_measured else -1.0))
    return ranked(measured)


def ranked(candidates: list[Candidate]) -> list[Candidate]:
    """Training processes by job and rank, the jobs of one name apart, then the busiest of the other Python programs.

    Left out are launchers and shells (their ranks are there), and forked helpers, such as data-loader workers.
    """
    by_pid = {one.pid: one for one in candidates}
    left_out: set[int] = set()
    for one in candidates:
        for parent in _chain(one, by_pid):
            above = by_pid[parent]
            copied = above.words == one.words and (above.on_gpu or not one.on_gpu)
            same_rank = one.identity.rank >= 0 and above.identity.rank == one.identity.rank
            if copied or (same_rank and (above.on_gpu or above.torch or not (one.on_gpu or one.torch))):
                left_out.add(one.pid)
            elif not above.on_gpu and one.trains and (same_rank or above.identity.rank < 0):
                left_out.add(parent)
    kept = [one for one in candidates if one.pid not in left_out]
    training = sorted((one for one in kept if one.trains), key=_place)
    others = sorted((one for one in kept if not one.trains and one.cpu >= BUSY_CPU), key=lambda one: -one.cpu)
    return training + others[:MAX_OTHERS]


def _place(one: Candidate) -> tuple[str, str, int, int]:
    """Job, what its processes share that were started together (without a rank: nothing), rank."""
    of = one.identity
    return of.job, of.lineage if of.rank >= 0 else "", of.rank, one.pid


def _chain(one: Candidate, by_pid: dict[int, Candidate]) -> list[int]:
    """The candidates above one of them: its parent, if that is one, and so on."""
    above: list[int] = []
    while (parent := by_pid.get(one.parent)) is not None and parent.pid not in above:
        above.append(parent.pid)
        one = parent
    return above


def _inspect(pid: int) -> Candidate | None:
    """What is known of a process; None: it is no candidate, or has ended."""
    try:
        words = read_command(pid)
        if not words or is_argus(words):
            return None
        started = start_ticks(pid)
        owner = os.stat(PROC / str(pid)).st_uid
    except OSError:
        return None
    identity = Identity()
    libraries: set[str] = set()
    python = runs_python(pid) or Path(words[0]).name.startswith(("python", "pypy"))
    try:
        libraries = {Path(mapping.path).name for mapping in executable_mappings(pid)}
        identity = identify(read_environment(pid), b"\0".join(map(os.fsencode, words)), read_cgroup(pid))
    except OSError:
        pass  # another user's
    on_gpu = any(name.startswith("libcuda.so") for name in libraries)
    torch = any(name.startswith("libtorch") for name in libraries)
    if started is None or not (on_gpu or torch or python or identity.rank >= 0):
        return None
    age_s = max(time.time() - boot_time() - started / os.sysconf("SC_CLK_TCK"), 0.0)
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = str(owner)
    return Candidate(pid, parent_of(pid), identity, user, tuple(words), on_gpu, torch, python, age_s=age_s)
