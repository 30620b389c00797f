"""Versions: kernel, microcode, NVIDIA driver, CUDA and NCCL, alike on nodes of one kind."""

from __future__ import annotations

import re

from argus.health.check import Absent, Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "kernel": Limit(
        "",
        "the kernel release that the node must run; empty: not checked",
        "peers are compared anyway (argus health report)",
    ),
    "microcode": Limit("", "the same of the CPUs' microcode", ""),
    "driver": Limit("", "the same of NVIDIA's driver", ""),
    "nccl": Limit("", "the same of the NCCL that the system has", ""),
}


def check(look: Look) -> Result:
    """Reads /proc and the loader's cache. Which NCCL a job uses may differ: PyTorch brings its own."""
    found = look.found()
    facts = found.facts
    facts["kernel"] = look.read("proc/sys/kernel/osrelease")
    levels = set(re.findall(r"^microcode\s*:\s*(\S+)", look.read("proc/cpuinfo"), re.MULTILINE))
    if levels:
        facts["microcode"] = "/".join(sorted(levels))
    if len(levels) > 1:
        found.warning(
            f"CPUs have different microcode: {facts['microcode']}", "Load it again early in boot, and restart."
        )
    try:
        driver = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", look.read("proc/driver/nvidia/version"))
        facts["driver"] = driver[1] if driver else "?"
    except Absent:
        pass
    for name, pattern in (("nccl", "libnccl.so.2.*"), ("cuda", "libcudart.so.1[0-9].*")):
        files = [f.name for place in _LIBRARIES for f in look.folders(f"{place}/{pattern}")]
        if files:
            facts[name] = max(files, key=lambda file: [int(n) for n in re.findall(r"\d+", file)]).partition(".so.")[2]
    for name in ("kernel", "microcode", "driver", "nccl"):
        wanted = look.limits[name]
        if wanted and facts.get(name, "none") != wanted:
            found.warning(f"{name} is {facts.get(name, 'not there')}, not {wanted}", "Install what the others have.")
    return found.result(", ".join(f"{name} {version}" for name, version in facts.items()))


_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/local/cuda/lib64")
