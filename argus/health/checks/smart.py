"""SMART: the state that disks report of themselves, by smartctl."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from argus.health.check import Absent, Blind, Look, Result
from argus.health.isolate import die_with_parent
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "wear": Limit(
        0.9,
        "used share of an SSD's life: warning",
        "NVMe specification: at 1.0 the vendor's guarantee of endurance ends",
    ),
    "spare": Limit(0.1, "spare share left: warning below", "NVMe: the usual available spare threshold"),
}


def check(look: Look) -> Result:
    """Asks ``smartctl --json -H -A`` (smartmontools 7) of each disk; it wakes none that sleeps (-n standby)."""
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/sbin", "/usr/local/sbin"]
    program = shutil.which("smartctl", path=":".join(filter(os.path.isabs, folders)))
    disks = [d.name for d in look.folders("sys/block/*") if d.name.startswith(("sd", "nvme"))]
    if not disks:
        raise Absent("no disks with SMART")
    if program is None:
        raise Blind("smartctl is not installed (smartmontools)")
    found, silent = look.found(), 0
    for disk in disks:
        look.note(f"smartctl /dev/{disk}")
        done = subprocess.run(
            [program, "--json", "-n", "standby", "-H", "-A", f"/dev/{disk}"],
            capture_output=True,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent,
        )
        try:
            report = json.loads(done.stdout)
        except ValueError:
            found.unknown(f"{disk}: smartctl answered no JSON (exit code {done.returncode})", "")
            continue
        if "smart_status" not in report:
            messages = report.get("smartctl", {}).get("messages") or [{}]
            message = messages[0].get("string", "smartctl gives no status")
            if (
                " STANDBY mode" in message
                or " SLEEP mode" in message
                or not report.get("smart_support", {}).get("available", 1)
            ):
                silent += 1  # it sleeps, or has none, as disks of virtual machines
            else:
                hint = "Run it as root." if os.geteuid() else f"See smartctl -x /dev/{disk}."
                found.unknown(f"{disk}: {message}", hint)
            continue
        health = report.get("nvme_smart_health_information_log", {})
        if not report["smart_status"].get("passed", True) or health.get("critical_warning", 0):
            found.critical(f"{disk} reports that it fails", f"Replace it: smartctl -a /dev/{disk}.")
        wear, spare = health.get("percentage_used", 0) / 100, health.get("available_spare", 100) / 100
        found.figures |= {
            f"wear_share/{disk}": wear,
            f"media_errors_total/{disk}": float(health.get("media_errors", 0)),
        }
        if wear >= look.limits["wear"] or spare < look.limits["spare"]:
            found.warning(f"{disk}: {wear:.0%} of its life used, {spare:.0%} spare left", "Plan to replace it.")
        if look.moved(found.figures, f"media_errors_total/{disk}"):
            found.warning(f"{disk}: new media errors {look.since()}", "Plan to replace it.")
    if silent == len(disks):
        raise Absent("every disk sleeps, or has no SMART")
    return found.result(f"{len(disks) - silent} disks report that they are well")
