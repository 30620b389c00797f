"""Clock: whether it is synchronised, how exact, and what it is counted by."""

from __future__ import annotations

import ctypes
import os

from argus.health.check import Blind, Look, Result
from argus.health.limit import Limit
from argus.model.units import seconds

LIMITS: dict[str, Limit] = {
    "warning_s": Limit(
        0.1,
        "largest possible error, s: warning",
        "logs of nodes can no longer be put in order; a healthy NTP client is far below",
    ),
    "critical_s": Limit(
        5.0,
        "largest possible error, s: critical",
        "Kerberos and certificates fail from minutes on, leases of file systems sooner",
    ),
    "sources": Limit(
        "tsc kvm-clock hyperv_clocksource_tsc_page arch_sys_counter xen",
        "clock sources that are fine, by spaces",
        "the kernel leaves tsc for hpet or acpi_pm when it drifts; these cost 1 µs a call, in every thread of the job",
    ),
}

_UNSYNCHRONISED = 0x0040  # STA_UNSYNC, include/uapi/linux/timex.h


class _Timex(ctypes.Structure):
    """``struct timex`` of sys/timex.h: adjtimex(2)."""

    _fields_ = [("modes", ctypes.c_uint)] + [
        (name, ctypes.c_long) for name in ("offset", "frequency", "maxerror", "esterror")
    ] + [("status", ctypes.c_int)] + [(f"rest{k}", ctypes.c_long) for k in range(40)]  # fmt: skip


def check(look: Look) -> Result:
    """Asks adjtimex(2) and /sys/devices/system/clocksource."""
    found = look.found()
    source = look.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    found.facts["clocksource"] = source
    if source not in look.limits["sources"].split():
        hint = "See why the kernel left tsc: dmesg | grep -i clocksource. Restart; if it comes back, replace the board."
        found.critical(f"time is counted by {source}, which is slow", hint)
    timex = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        raise Blind(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    if timex.status & _UNSYNCHRONISED:
        found.warning("nothing keeps the clock right", "Start chronyd, ntpd or systemd-timesyncd: chronyc tracking.")
        return found.result("")
    error = timex.maxerror / 1e6
    found.figures["error_s"] = error
    text = f"{source}, right to {seconds(error)}"
    wrong = f"may be wrong by {seconds(error)}"
    found.above(error, look.limits["warning_s"], look.limits["critical_s"], wrong, "chronyc tracking")
    return found.result(text)
