"""What a container may lack, and what a test that needs it is skipped for: that is no failure of Argus."""

from __future__ import annotations

import os
import pty
import subprocess
from functools import cache

import pytest


def open_terminal() -> tuple[int, int]:
    """A pseudo-terminal: descriptors of both ends. Skips the test where there are none."""
    try:
        return pty.openpty()
    except OSError as reason:
        pytest.skip(f"no pseudo-terminals here ({reason.strerror}): mount -t devpts devpts /dev/pts")


@cache
def mount_refusal() -> str:
    """Why this process may not mount file systems in a namespace of its own; empty: it may."""
    try:
        command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /proc"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as reason:
        return str(reason.strerror)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def needs_mounts() -> None:
    """Skips the test where nothing can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounts file systems: needs root")
    if refusal := mount_refusal():
        pytest.skip(f"mounts file systems, which is not allowed here ({refusal}): it takes CAP_SYS_ADMIN")
