"""Huge pages: the setting for transparent ones, and reserved ones."""

from __future__ import annotations

from argus.health.check import Look, Result, numbers
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "transparent": Limit(
        "always madvise",
        "settings that are fine, by spaces",
        "PyTorch and NCCL ask for them by madvise; 'never' costs TLB misses",
    ),
    "defrag": Limit(
        "madvise defer defer+madvise never",
        "settings of defrag that are fine, by spaces",
        "'always' compacts memory inside page faults: Documentation/admin-guide/mm/transhuge.rst",
    ),
    "reserved": Limit(0, "pages that must be reserved (HugePages_Total)", "0: none are needed"),
}


def check(look: Look) -> Result:
    """Reads /sys/kernel/mm/transparent_hugepage and /proc/meminfo."""
    found = look.found()
    for name, file in (("transparent", "enabled"), ("defrag", "defrag")):
        text = look.read(f"sys/kernel/mm/transparent_hugepage/{file}")
        setting = text.partition("[")[2].partition("]")[0]
        found.facts[f"huge_pages_{file}"] = setting
        if setting not in look.limits[name].split():
            hint = f"echo {look.limits[name].split()[0]} > /sys/kernel/mm/transparent_hugepage/{file}"
            found.warning(f"transparent huge pages: {file} is {setting}", hint)
    reserved = dict(numbers(look.read("proc/meminfo"))).get("HugePages_Total", 0)
    found.figures["reserved"] = float(reserved)
    if reserved < look.limits["reserved"]:
        found.warning(
            f"{reserved} huge pages reserved of {look.limits['reserved']}", "sysctl vm.nr_hugepages, early after boot."
        )
    return found.result(f"transparent {found.facts['huge_pages_enabled']}, {reserved} reserved")
