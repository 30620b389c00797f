"""What Argus may take of a node's memory and of descriptors: it is what dies, never the job that it looks at."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

DATA_BYTES = 4 << 30
"""Private memory that a tracer may ask for, most of which is never touched: allocators reserve. 500 processes take 0.4
GB. Beyond it an allocation fails, which costs what was being read, and is counted."""
OOM_SCORE = 400
"""The kernel ends Argus before a job when a node runs out of memory, and the embedded engine (500), which is started
anew, before Argus."""
_SCORE = Path("/proc/self/oom_score_adj")


@contextlib.contextmanager
def frugal() -> Iterator[None]:
    """Bounds this process's memory, and offers it first when there is none left, until the end. What it starts
    meanwhile inherits both: see ``unbounded``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = ""
    bounded = soft == resource.RLIM_INFINITY or soft > DATA_BYTES
    with contextlib.suppress(OSError, ValueError):
        before = _SCORE.read_text()
        if int(before) < OOM_SCORE:
            _SCORE.write_text(str(OOM_SCORE))
    if bounded:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, hard))
    try:
        yield
    finally:
        if bounded:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        with contextlib.suppress(OSError):
            _SCORE.write_text(before)


def raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as it may: each file that traced processes map takes one, and kernels
    without multi links one a probe and process, more than the usual soft limit of 1,024. Call it before anything is
    noted of a process: the room for files and links goes by the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def unbounded() -> None:
    """Takes off this process what it inherited of ``frugal``: for one with bounds of its own."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
