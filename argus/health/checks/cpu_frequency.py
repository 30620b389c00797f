"""CPU: governor, thermal throttling, and whether every CPU is online."""

from __future__ import annotations

from argus.health.check import Absent, Blind, Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "governor": Limit(
        "performance",
        "the cpufreq governor that CPUs must have; empty: not checked",
        "others lower clocks between kernels' launches; NVIDIA's and vendors' tuning guides set it",
    ),
    "throttled": Limit(1, "thermal throttle events of a package in an hour: warning", "a cooled server has none"),
}


def check(look: Look) -> Result:
    """Reads cpufreq and thermal_throttle in /sys/devices/system/cpu. Virtual machines have neither."""
    found = look.found()
    here = "sys/devices/system/cpu"
    present, online = look.read(f"{here}/present"), look.read(f"{here}/online")
    if present != online:
        found.warning(
            f"CPUs {online} of {present} are online", "Bring them back: chcpu -e, or see why the firmware took them."
        )
    governors: dict[str, int] = {}
    wanted = look.limits["governor"]
    for file in look.folders(f"{here}/cpu[0-9]*/cpufreq/scaling_governor"):
        try:
            governor = look.read(str(file.relative_to(look.root)))
        except (Absent, Blind):
            continue  # those of a CPU that is offline answer EBUSY
        governors[governor] = governors.get(governor, 0) + 1
    strange = {name: count for name, count in governors.items() if name != wanted}
    if wanted and strange:
        listed = ", ".join(f"{name} on {count} CPUs" for name, count in strange.items())
        found.warning(f"governor {listed}, not {wanted}", f"Set it: cpupower frequency-set -g {wanted}.")
    counts = [
        look.optional(str(f.relative_to(look.root))) or 0
        for f in look.folders(f"{here}/cpu*/thermal_throttle/package_throttle_count")
    ]
    if counts:
        found.figures["throttles_total"] = float(max(counts))
        rise = look.moved(found.figures, "throttles_total") or 0.0
        if rise >= look.limits["throttled"]:
            found.warning(f"throttled for heat {rise:.0f} times {look.since()}", "Look at fans and air flow.")
    return found.result(f"CPUs {online} online, governor {'/'.join(governors) or 'not ours to set'}")
