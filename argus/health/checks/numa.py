"""NUMA: automatic balancing, which moves pages under a running job."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.limit import Limit
from argus.model.text import counted

LIMITS: dict[str, Limit] = {
    "balancing": Limit(
        False,
        "whether automatic balancing may be on",
        "it unmaps pages to see who uses them; NVIDIA's Grace and DGX tuning guides switch it off",
    ),
}


def check(look: Look) -> Result:
    """Reads kernel.numa_balancing; nodes with one NUMA node have nothing to balance."""
    found = look.found()
    nodes = look.folders("sys/devices/system/node/node[0-9]*")
    if len(nodes) < 2:
        raise Absent("one NUMA node")
    if look.number("proc/sys/kernel/numa_balancing") and not look.limits["balancing"]:
        found.warning("automatic NUMA balancing is on", "sysctl kernel.numa_balancing=0")
    empty = [n.name for n in nodes if "MemTotal:       0 kB" in look.read(f"{n.relative_to(look.root)}/meminfo")]
    found.facts["numa"] = f"{counted(len(nodes), 'node')}, {len(empty)} without memory"
    return found.result(found.facts["numa"])
