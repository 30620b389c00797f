"""GPU errors in the kernel log: Xid of GPUs, SXid of NVSwitches, and what each asks for."""

from __future__ import annotations

import re

from argus.health.check import Absent, Look, Result
from argus.health.checks._kmsg import messages
from argus.health.checks._nvml import on_bus
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "hours": Limit(
        24.0, "how far to look back", "long enough that somebody sees it; reset or replaced GPUs come clean a day later"
    ),
    "ignore": Limit([], "codes to leave out, as strings", "such as 13 and 31, which most often are a program's fault"),
}

_RESET = "Drain the node and reset the GPU: nvidia-smi -r."
_REPLACE = "Drain the node; restart it; if it comes again, replace the GPU."
_APP = "Most often the program's fault: see its log; on several programs alike, run dcgmi diag -r 3."
_DRIVER = "Restart the job; if it comes again, the node; then update the driver."
_LINK = "Reset the GPU; if it comes again, reseat or replace it, or see the NVSwitch: nvidia-smi nvlink -e."
# Meanings: docs.nvidia.com/deploy/xid-errors. True: jobs cannot go on on this GPU.
CODES: dict[int, tuple[str, bool, str]] = {
    8: ("the GPU stopped processing", False, _DRIVER),
    13: ("exception in a program's kernel", False, _APP),
    31: ("page fault in GPU memory", False, _APP),
    32: ("corrupted push buffer", False, _DRIVER),
    38: ("driver firmware error", False, _DRIVER),
    43: ("the GPU stopped a program that had failed", False, _APP),
    44: ("fault in context switching", False, _DRIVER),
    45: ("a program's channels were torn down after an error", False, _APP),
    46: ("the GPU stopped processing", True, _RESET),
    48: ("uncorrected memory error", True, _RESET),
    54: ("auxiliary power is not connected", True, "Connect the power cable."),
    61: ("the GPU's controller halted (breakpoint)", True, _RESET),
    62: ("the GPU's controller halted", True, _RESET),
    63: ("a memory row or page is to be replaced at the next reset", False, _RESET),
    64: ("a memory row or page could not be replaced", True, _REPLACE),
    66: ("illegal access by the driver", False, _DRIVER),
    68: ("video decoder exception", False, _DRIVER),
    69: ("graphics engine class error", False, _APP),
    74: ("NVLink error", True, _LINK),
    79: (
        "the GPU has fallen off the bus",
        True,
        "Switch the node off and on; if it comes again, see power and slot, then replace.",
    ),
    92: ("many corrected memory errors", False, "Run dcgmi diag -r 3, and watch it."),
    94: ("uncorrected memory error, contained: one program ended", False, _RESET),
    95: ("uncorrected memory error, not contained", True, _RESET),
    109: ("context switch timed out", False, _DRIVER),
    110: ("security fault", True, _RESET),
    119: ("the GPU's system processor does not answer", True, _RESET),
    120: ("error of the GPU's system processor", True, _RESET),
    121: ("error on the link to the CPU (C2C)", True, _REPLACE),
    122: ("the board's flash could not be read", False, _REPLACE),
    123: ("the board's flash could not be written", False, _REPLACE),
    136: ("the GPU's link training failed", True, _LINK),
    137: ("a remote NVLink access was refused", False, _APP),
    140: ("uncorrected memory error, not recovered", True, _RESET),
    143: ("the GPU could not be initialised", True, _REPLACE),
    **dict.fromkeys(range(144, 151), ("NVLink error", True, _LINK)),
    154: ("the GPU asks for an action to recover", True, "Follow the message: reset, restart, or drain."),
    155: ("NVLink error, as software defines it", True, _LINK),
    156: ("a memory resource is to be retired at the next reset", False, _RESET),
    157: ("a memory resource could not be retired", True, _REPLACE),
    158: ("the GPU timed out for good", True, _RESET),
}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?((?:[0-9a-fA-F]+:)+[0-9a-fA-F.]+)\): ([0-9]{1,5})\b(.*)")
_SXID = re.compile(
    r"nvidia-nvswitch([0-9]+): SXid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]{1,5}), (Non-fatal|Fatal)(.*)", re.IGNORECASE
)


def check(look: Look) -> Result:
    """Reads the kernel log. Each code is reported once a GPU, with the newest message's age."""
    found = look.found()
    xids: dict[tuple[str, int], tuple[float, int, str]] = {}
    switches: dict[tuple[str, int, bool], tuple[float, int, str]] = {}
    looked = False
    for age, text in messages(look, look.limits["hours"]):
        looked = looked or "NVRM" in text or "nvidia" in text
        if match := _XID.match(text):
            key = match[1], int(match[2])
            xids[key] = age, xids.get(key, (0.0, 0, ""))[1] + 1, match[3]
        elif match := _SXID.match(text):
            where = match[2], int(match[3]), match[4].lower() == "fatal"
            switches[where] = age, switches.get(where, (0.0, 0, ""))[1] + 1, match[5]
    for (address, code), (age, times, rest) in sorted(xids.items(), key=lambda item: item[1][0]):
        if str(code) in look.limits["ignore"]:
            continue
        meaning, serious, hint = CODES.get(code, ("see docs.nvidia.com/deploy/xid-errors", False, "Look it up."))
        text = f"GPU {address}: Xid {code}, {meaning}" + (f" ({times} times)" if times > 1 else "") + _ago(age)
        if code == 154:
            text += f": {rest.strip(' ,')}"
            serious = not re.search(r"to \S+ \(None\)", rest)
        (found.critical if serious else found.warning)(text, hint)
    for (address, code, fatal), (age, times, rest) in switches.items():
        text = f"NVSwitch {address}: SXid {code},{rest}" + (f" ({times} times)" if times > 1 else "") + _ago(age)
        if fatal:
            found.critical(text, "Drain the node and restart it; if it comes again, replace the NVSwitch tray.")
        else:
            found.warning(text, "Watch it; a GPU's Xid beside it decides.")
    found.figures["xids"] = float(sum(times for _, times, _ in xids.values()))
    found.figures["sxids"] = float(sum(times for _, times, _ in switches.values()))
    if not looked and not on_bus(look) and not look.path("proc/driver/nvidia").exists():
        raise Absent("no NVIDIA driver")
    return found.result(f"none in the last {look.limits['hours']:.0f} h")


def _ago(age_s: float) -> str:
    return f", {age_s / 3600:.0f} h ago" if age_s >= 5400 else f", {age_s / 60:.0f} min ago"
