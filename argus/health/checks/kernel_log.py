"""Kernel log: hardware errors, hangs, and broken disks and mounts."""

from __future__ import annotations

import re

from argus.health.check import Look, Result
from argus.health.checks._kmsg import messages
from argus.health.checks._mounts import IMAGE
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "hours": Limit(6.0, "how far to look back", "old enough messages have been dealt with, or come again"),
    "ignore": Limit([], "regular expressions of messages to leave out", ""),
}

_DEVICE = r"(?:[\w.-]+ [\w:.-]*[\w-](?: [\w.-]+)?: )?"
"""What dev_err and netdev_err put before a message: driver, device, interface."""

# Messages of the kernel (6.x sources: the name of the file behind each) from their beginning on, since others hold what
# processes and files are called. So each asks for more than the 15 bytes that the name of a process has, before it lets
# anything follow; whether it is critical, and what to do.
PATTERNS: list[tuple[str, bool, str]] = [
    (
        r"(mce: |\{\d+\})?\[Hardware Error\].*[Uu]ncorrected|(mce: )?Uncorrected hardware memory error",
        True,
        "Drain the node: memory or CPU fails; ras-mc-ctl, the BMC's log.",
    ),
    (
        r"(mce: |\{\d+\})?\[Hardware Error\]|mce: .*[Mm]achine [Cc]heck",
        False,
        "Memory or CPU had an error: ras-mc-ctl --summary, the BMC's log.",
    ),
    (
        _DEVICE + r"AER: (Multiple )?Uncorrect(ed|able) \((Non-)?Fatal\) error ",
        True,
        "A PCIe device fails: lspci -vv; reseat it.",
    ),
    (
        _DEVICE + r"AER: (Multiple )?Correct(ed|able) error (message )?received",
        False,
        "A PCIe link repeats packets: lspci -vv; reseat the device.",
    ),
    (
        r"INFO: task .* blocked for more than \d+ seconds",
        False,
        "A task hangs in the kernel: a disk, mount or driver; see the stack in dmesg.",
    ),
    (
        r"watchdog: BUG: soft lockup|(NMI )?[Ww]atchdog.*hard LOCKUP|(rcu: )?INFO: rcu.*detected stall",
        True,
        "A CPU hung in the kernel: update kernel or driver, restart.",
    ),
    (
        rf"EXT4-fs error \(device {IMAGE}\)|EXT4-fs \({IMAGE}\): Remounting filesystem read-only"
        rf"|XFS \({IMAGE}\): .*([Cc]orruption|[Mm]etadata I/O [Ee]rror|log I/O error)"
        rf"|BTRFS:? (error|critical|alert|emerg) \(device {IMAGE}[ :)]"
        rf"|((blk_update_request|print_req_error): )?(I/O error|critical medium error), dev {IMAGE}, sector \d"
        rf"|Buffer I/O error on dev(ice)? {IMAGE},",
        False,
        "An image is broken, or what it lies on: often a user's (losetup -l).",
    ),
    (
        r"EXT4-fs error \(device|EXT4-fs \([\w.!-]+\): Remounting filesystem read-only"
        r"|XFS \([\w.!-]+\): .*([Cc]orruption|[Mm]etadata I/O [Ee]rror|log I/O error)"
        r"|BTRFS:? (error|critical|alert|emerg) \(device ",
        True,
        "Unmount and check the file system.",
    ),
    (
        r"((blk_update_request|print_req_error): )?(I/O error|critical medium error), dev \S+, sector \d"
        r"|Buffer I/O error on ",
        True,
        "A disk fails: smartctl -a.",
    ),
    (
        r"nvme [\w:.]+: (I/O (tag )?\d+ .*timeout|controller is down|Abort status: )",
        False,
        "An SSD does not answer: smartctl -a, its firmware.",
    ),
    (
        r"nfs: server \S+ not responding|LustreError: (\d+:\d+:\(|\w+-\w+: )|ceph: (\[[^\]]*\]: )?mds\d+ hung$",
        False,
        "A network file system does not answer: its server, the network.",
    ),
    (
        r"clocksource: (timekeeping watchdog on CPU\d+: )?(Marking clocksource |Clocksource \S+ unstable)",
        False,
        "See the check clock.",
    ),
    (
        r"mlx5_core [\w:.]+(?: [^\s:]+)?: .*(health compromised|device's health|Internal error)"
        r"|bnxt_en [\w:.]+(?: [^\s:]+)?: (?!renamed from ).*(firmware.*(hung|reset))",
        True,
        "A network adapter fails: its firmware, mlxfwmanager; then replace it.",
    ),
    (
        _DEVICE + r"NETDEV WATCHDOG: .*transmit queue .* timed out",
        False,
        "A network adapter hung: its driver and firmware.",
    ),
    (r"thermal thermal_zone.*critical temperature", True, "The node is about to switch itself off: cooling."),
]


def check(look: Look) -> Result:
    """Reads the kernel log; the first pattern that fits a message counts."""
    found = look.found()
    rules = [re.compile(pattern) for pattern, _, _ in PATTERNS]
    ignored = [re.compile(pattern) for pattern in look.limits["ignore"]]
    matched: dict[int, tuple[int, str]] = {}
    lines = 0
    for _, text in messages(look, look.limits["hours"]):
        lines += 1
        if any(rule.search(text) for rule in ignored):
            continue
        which = next((number for number, rule in enumerate(rules) if rule.match(text)), None)
        if which is not None:
            matched[which] = matched.get(which, (0, ""))[0] + 1, text
    for which, (times, text) in matched.items():
        message = text[:120] + (f" ({times} times)" if times > 1 else "")
        _, critical, hint = PATTERNS[which]
        (found.critical if critical else found.warning)(message, hint)
    found.figures["messages"] = float(sum(times for times, _ in matched.values()))
    return found.result(f"nothing bad in {lines} messages of {look.limits['hours']:.0f} h")
