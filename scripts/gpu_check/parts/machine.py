"""What the machine has: GPU, driver, kernel, rights, libraries, and the output of `argus check`."""

from __future__ import annotations

import ctypes
import glob
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.gpu_check.common import Context, target_environment

_TORCH = """
import json, os, sys, sysconfig
found = {"python": sys.version.split()[0], "executable": sys.executable}
def ask(name, how):
    try:
        found[name] = str(how())
    except Exception as failure:
        found[name] = f"none: {type(failure).__name__}: {failure}"[:200]
import importlib.metadata as m
for package in ("torch", "triton", "nvidia-nccl-cu13", "nvidia-cuda-cupti", "nvidia-cuda-runtime", "cupy-cuda13x",
                "numpy", "pyarrow", "cupti-python"):
    ask(package, lambda: m.version(package))
import torch
ask("device", lambda: torch.cuda.get_device_name(0))
ask("capability", lambda: torch.cuda.get_device_capability(0))
ask("multiprocessors", lambda: torch.cuda.get_device_properties(0).multi_processor_count)
ask("torch CUDA", lambda: torch.version.cuda)
ask("torch NCCL", lambda: ".".join(map(str, torch.cuda.nccl.version())))
if torch.cuda.is_available():
    torch.randn(1, device="cuda")
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.randn(1, device="cuda")
        torch.cuda.synchronize()
wanted = ("libcuda.so", "libcudart", "libnccl", "libcupti", "libtorch_cuda", "libstdc++")
found["libraries"] = sorted({line.split()[-1] for line in open("/proc/self/maps") if any(w in line for w in wanted)})
print(json.dumps(found))
"""


def _output_of(*command: str, timeout_s: float = 15, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
        return (done.stdout + done.stderr).strip() + (f" [exit {done.returncode}]" if done.returncode else "")
    except (OSError, subprocess.TimeoutExpired) as failure:
        return f"none: {failure}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError as failure:
        return f"none: {failure.strerror}"


def _config() -> list[str]:
    import gzip

    wanted = ("CONFIG_UPROBES", "CONFIG_UPROBE_EVENTS", "CONFIG_BPF_SYSCALL", "CONFIG_BPF_JIT", "CONFIG_BPF_EVENTS",
              "CONFIG_DEBUG_INFO_BTF", "CONFIG_PROC_EVENTS", "CONFIG_CONNECTOR", "CONFIG_FTRACE", "CONFIG_PERF_EVENTS",
              "CONFIG_KPROBES", "CONFIG_TASK_DELAY_ACCT", "CONFIG_SCHED_INFO", "CONFIG_MODULES")  # fmt: skip
    try:
        with gzip.open("/proc/config.gz", "rt") as config:
            text = config.read().splitlines()
    except OSError as failure:
        return [f"/proc/config.gz: {failure.strerror}"]
    lines = [line.removeprefix("# ").replace(" is not set", "=n") for line in text]
    return [line for line in lines if line.split("=")[0] in wanted]


def _cupti_versions(libraries: list[str]) -> dict[str, Any]:
    candidates = [path for path in libraries if "libcupti.so" in path]
    for pattern in (
        f"{sys.prefix}/lib/python3*/site-packages/nvidia/*/lib/libcupti.so*",
        "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so*",
        "/usr/local/cuda*/targets/*/lib/libcupti.so*",
    ):
        candidates += sorted(glob.glob(pattern))
    found: dict[str, Any] = {}
    for path in {os.path.realpath(path) for path in candidates}:
        code = (
            "import ctypes, sys\nv = ctypes.c_uint32()\n"
            "print(ctypes.CDLL(sys.argv[1]).cuptiGetVersion(ctypes.byref(v)), v.value)"
        )
        found[path] = _output_of(sys.executable, "-c", code, path)
    return found


def run(ctx: Context) -> None:
    smi = _output_of(
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,persistence_mode,mig.mode.current,"
        "compute_mode,pcie.link.gen.current",
        "--format=csv,noheader",
    )
    mounts = [
        line for line in _read("/proc/mounts").splitlines() if any(w in line for w in ("tracefs", "bpf", "cgroup"))
    ]
    facts: dict[str, Any] = {
        "nvidia-smi": smi,
        "nvidia driver": _read("/proc/driver/nvidia/version").splitlines()[0],
        "profiling rights": [
            line
            for line in _read("/proc/driver/nvidia/params").splitlines()
            if "Prof" in line or line.startswith("none")
        ],
        "kernel": f"{platform.release()} {platform.machine()}, {os.cpu_count()} CPUs",
        "cpu": next((x.split(":")[1].strip() for x in _read("/proc/cpuinfo").splitlines() if "model name" in x), ""),
        "kernel configuration": _config(),
        "user": f"uid {os.getuid()}, " + ", ".join(x for x in _read("/proc/self/status").splitlines() if "Cap" in x),
        "cgroup": _read("/proc/self/cgroup"),
        "mounts": mounts,
        "btf": f"{Path('/sys/kernel/btf/vmlinux').exists()}",
        "perf_event_paranoid": _read("/proc/sys/kernel/perf_event_paranoid"),
        "unprivileged_bpf_disabled": _read("/proc/sys/kernel/unprivileged_bpf_disabled"),
        "ptrace_scope": _read("/proc/sys/kernel/yama/ptrace_scope"),
        "uprobe PMU": str(Path("/sys/bus/event_source/devices/uprobe").is_dir()),
        "clocksource": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION"),
        "nvcc": _output_of("nvcc", "--version").splitlines()[-1:],
        "memory": _read("/proc/meminfo").splitlines()[:1],
    }
    ctx.save(facts=facts)
    for kind in ("tracefs", "bpf"):
        place = str(ctx.folder(f"mount-{kind}"))
        facts[f"mount {kind}"] = _output_of("mount", "-t", kind, "nodev", place) or "works"
        if facts[f"mount {kind}"] == "works":
            _output_of("umount", place)
    output = _output_of(ctx.python, "-c", _TORCH, timeout_s=60, env=target_environment())
    found = next((json.loads(line) for line in output.splitlines() if line.startswith("{")), {})
    facts["torch"] = found or output[-300:]
    if not ctx.fake:
        ctx.check(
            "PyTorch sees a GPU", "none" not in found.get("device", "none"), str(found.get("device", output[-300:]))
        )
    with ctx.trying("CUPTI versions"):
        facts["CUPTI"] = _cupti_versions(found.get("libraries", []))
    ctx.save(facts=facts)
    with ctx.trying("argus check"):
        from argus.live.preflight import check_all, tracing_works

        features = check_all()
        ctx.table(
            "argus check",
            ["feature", "state", "detail"],
            [
                [f.name, "on" if f.on else "off", f.detail + (f" ({f.fix})" if f.fix and not f.on else "")]
                for f in features
            ],
        )
        needed = [f for f in features if f.name != "ClickHouse engine"]
        lacking = [f.name for f in needed if f.needed and not f.on]
        ctx.check("argus can trace here", tracing_works(needed), f"lacks {', '.join(lacking)}" if lacking else "")
    rows = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows += [[f"{key}: {k}", str(v)] for k, v in value.items()]
        elif isinstance(value, list):
            rows += [[key, "; ".join(map(str, value))]]
        else:
            rows.append([key, str(value)])
    ctx.table("machine", ["what", "is"], rows)
    libcuda = True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as failure:
        libcuda = False
        facts["libcuda"] = str(failure)
    if not ctx.fake:
        ctx.check("libcuda.so.1 loads", libcuda)
