"""Limits: open files, processes and threads against what the kernel allows."""

from __future__ import annotations

from argus.health.check import Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "warning": Limit(0.8, "used share: warning", "what a restart of a job needs at once is some ten percent"),
    "critical": Limit(0.95, "used share: critical", "the next fork or open fails"),
}


def check(look: Look) -> Result:
    """Reads fs.file-nr, the number of tasks in /proc/loadavg, kernel.pid_max and kernel.threads-max."""
    found = look.found()
    opened, _, allowed = (int(word) for word in look.read("proc/sys/fs/file-nr").split())
    tasks = int(look.read("proc/loadavg").split()[3].partition("/")[2])
    most = min(look.number("proc/sys/kernel/pid_max"), look.number("proc/sys/kernel/threads-max"))
    for what, share in (("files", opened / allowed), ("tasks", tasks / most)):
        found.figures[f"used_{what}_share"] = share
        text = f"{share:.0%} of the {what} that the kernel allows are in use"
        found.above(share, look.limits["warning"], look.limits["critical"], text, "Find who leaks them: lsof, ps -eLf.")
    return found.result(f"{opened:,} files, {tasks:,} tasks")
