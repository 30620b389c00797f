"""Files of /proc: whose a process is, its user and the container that it runs in."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

PROC = Path("/proc")
POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
"""A pod's cgroup."""
_SLURM = re.compile(r"/slurm[^/]*/(?:.*/)?job_([0-9]{1,19})(?:/|$)", re.MULTILINE)
"""Slurm's cgroup of a job: /slurm/uid_1000/job_42 (version 1), …/slurmstepd.scope/job_42 (version 2)."""


def read_file(path: str) -> bytes:
    """A small file of /proc, in a third of the time that ``Path.read_bytes`` takes.

    Raises:
        OSError: It is not there, or may not be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 1 << 14):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def owner_of(pid: int) -> tuple[int, str]:
    """User and container of a process, as ``Identity.owner``; (-1, ""): it has ended."""
    try:
        uid = user_of(pid)
        return (uid, container_of(pid, read_cgroup(pid))) if uid >= 0 else (-1, "")
    except OSError:
        return -1, ""


def user_of(pid: int) -> int:
    """The user that a process runs as (its effective one), as this host numbers users; -1: it has ended."""
    try:
        for line in read_file(f"{PROC}/{pid}/status").splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[2])
    except OSError:
        pass
    return -1


def masters_of(pid: int) -> tuple[int, ...]:
    """Users who may do to a process whatever they like: root, its own, and who is root in its user namespace; as this
    host numbers users."""
    owners = [0, user_of(pid)]
    with contextlib.suppress(OSError):
        for line in read_file(f"{PROC}/{pid}/uid_map").splitlines():
            inside, outside, _ = map(int, line.split())
            owners += [outside] if inside == 0 else []
    return tuple(uid for uid in owners if uid >= 0)


def read_cgroup(pid: int) -> str:
    """/proc/PID/cgroup, or nothing where there are no cgroups."""
    try:
        return (PROC / str(pid) / "cgroup").read_text(errors="replace")
    except FileNotFoundError:
        return ""


def container_of(pid: int, cgroup: str) -> str:
    """What distinguishes two containers: the pod, whose containers have PID namespaces of their own; Slurm's job, which
    has none; else the PID namespace. Empty: the process is in none."""
    if pod := POD.search(cgroup):
        return f"pod {pod.group(1).replace('_', '-')}"
    if job := _SLURM.search(cgroup):
        return f"slurm {job.group(1)}"
    try:
        namespace = os.readlink(f"{PROC}/{pid}/ns/pid")
        return "" if namespace == os.readlink(f"{PROC}/self/ns/pid") else namespace
    except OSError:
        return ""
