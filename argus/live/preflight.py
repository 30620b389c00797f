"""Whether tracing works here, by doing it: each feature is on, or off with the reason and the remedy."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from argus.capture.kernel import bcc
from argus.capture.kernel.links import Backend
from argus.capture.probes import MINIMUM_KERNEL, Probes, kernel_version
from argus.capture.process.elf import Elf
from argus.capture.process.mapped import open_file
from argus.capture.process.targets import Library, executable_mappings, sees_host_pids
from argus.capture.python.code import CodeResolver
from argus.capture.python.interpreter import PythonProcess, find_interpreter
from argus.capture.sampler import StackProbes
from argus.cupti import build
from argus.model import calls
from argus.model.errors import ArgusError
from argus.model.units import binary_size, seconds
from argus.system import child, installation, privileges
from argus.system.aside import Aside

ATTACH_S = 10.0
"""The self-test's probes are waited for no longer."""
PROBE_CALLS = 7
"""Calls the self-test makes: a prime, so that a multiple of what was made cannot pass."""


@dataclass(frozen=True)
class Feature:
    """One line of ``argus check``.

    Attributes:
        name: What it is.
        on: Whether it works.
        detail: What was found, or why it is off.
        fix: What to do; empty when on, or when nothing can be done.
        needed: Whether tracing is impossible without it.
        partial: Whether something that it consists of did not start: a trace works, and lacks that.
    """

    name: str
    on: bool
    detail: str
    fix: str = ""
    needed: bool = False
    partial: bool = False


@dataclass(frozen=True)
class State:
    """What one look found: ``Feature`` without its name."""

    on: bool
    detail: str
    fix: str = ""
    partial: bool = False


def check_all() -> list[Feature]:
    """Every feature, in the order a person would mend them. Takes about two seconds."""
    features = []
    for name, look, needed in (
        ("kernel", _kernel, True),
        ("BTF", _btf, False),
        ("capabilities", _capabilities, True),
        ("PID namespace", _pid_namespace, True),
        ("tracefs", _tracefs, False),
        ("bcc", _bcc, True),
        ("eBPF", probe_self, True),
        ("stacks", sample_self, False),
        ("ClickHouse engine", _store_engine, not os.environ.get("ARGUS_STORE", "").startswith("clickhouse:")),
        ("CUPTI", _cupti, False),
        ("NVML", _nvml, False),
        ("installation", _installation, False),
    ):
        try:
            state = look()
        except ArgusError as failure:
            state = State(False, failure.message, failure.hint)
        except Exception as reason:  # a check that breaks is a check that says so
            state = State(False, f"could not be checked: {type(reason).__name__}: {reason}")
        features.append(Feature(name, state.on, state.detail, state.fix, needed, state.partial))
    return features


def _installation() -> State:
    """Whether root alone may change what root runs as ``argus``."""
    changeable = installation.changeable()
    if changeable is None:
        return State(True, "root alone may change what root runs")
    part, reason = changeable
    return State(False, f"others can become root when root runs it: {part}: {reason}", installation.fix(part))


def tracing_works(features: list[Feature]) -> bool:
    """Whether ``argus trace`` would work."""
    return all(feature.on for feature in features if feature.needed)


def _kernel() -> State:
    release = os.uname().release
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        return State(False, f"Linux {release} on {machine}", "Argus supports x86_64 and aarch64")
    if kernel_version() < MINIMUM_KERNEL:
        return State(False, f"Linux {release}", "uprobes with cookies need Linux 5.15")
    if not Path("/sys/bus/event_source/devices/uprobe").is_dir():
        return State(False, f"Linux {release} without uprobes", "Use a kernel with CONFIG_UPROBES")
    return State(True, f"Linux {release}, {machine}")


def _btf() -> State:
    path = Path("/sys/kernel/btf/vmlinux")
    if path.is_file():
        return State(True, f"{path}, {binary_size(path.stat().st_size)}")
    return State(False, "the kernel has no type information", "Use a kernel with CONFIG_DEBUG_INFO_BTF")


def _capabilities() -> State:
    has, wanted = privileges.effective(), privileges.needed()
    if lacks := [f"CAP_{name} ({why})" for name, why in wanted.items() if name not in has]:
        return State(False, f"lacks {', '.join(lacks)}", "Run with sudo, or give it these capabilities")
    absent = [f"CAP_{name} ({why})" for name, why in privileges.USEFUL.items() if name not in has | wanted.keys()]
    detail = ", ".join(f"CAP_{name}" for name in wanted)
    return State(True, f"{detail}; lacks {', '.join(absent)}" if absent else detail, partial=bool(absent))


def _pid_namespace() -> State:
    if sees_host_pids():
        return State(True, "the host's")
    return State(
        False,
        "Argus runs in a container with PIDs of its own, while the kernel reports the host's",
        "Start the container with --pid=host, or run Argus on the host",
    )


def _tracefs() -> State:
    for place in ("/sys/kernel/tracing", "/sys/kernel/debug/tracing"):
        if Path(place, "events").is_dir():
            return State(True, place)
    return State(
        False,
        "not mounted; nothing that Argus traces needs it",
        "mount -t tracefs nodev /sys/kernel/tracing",
    )


def _bcc() -> State:
    try:
        return State(True, f"{bcc.version()} at {bcc.find()}")
    except ArgusError as failure:
        return State(False, failure.message, failure.hint)


def own_library(symbol: str) -> tuple[Library, ctypes.CDLL]:
    """A library of this process that exports ``symbol``, ``symbol`` passing for one of libcuda."""
    for mapping in executable_mappings(os.getpid()):
        if not Path(mapping.path).name.startswith(("libc.so", "libc-", "ld-musl")):
            continue
        file = open_file(mapping.path)
        offset = Elf(file).functions([symbol]).get(symbol)
        if offset is not None:
            library = Library(
                mapping.path, file, mapping.device, mapping.inode, False, {"cuCtxSynchronize": offset}, ()
            )
            return library, ctypes.CDLL(None)
    raise ArgusError(f"no libc with {symbol} is mapped here")


_RETURNS = {"x86_64": bytes.fromhex("f30f1efa31c0c3"), "aarch64": bytes.fromhex("000080d2c0035fd6")}
"""A function that returns 0, by machine: endbr64, xor eax,eax, ret; mov x0,0, ret."""


def own_code() -> tuple[Library, Callable[[], int]]:
    """A file with one function, which nobody else maps, so that nobody can hold up a probe on it; passing for one of
    libcuda. And the function.

    Raises:
        ArgusError: There is none for this machine, or this system lets no memory be run.
    """
    code = _RETURNS.get(platform.machine())
    if code is None:
        raise ArgusError(f"no probe can be tried on {platform.machine()}")
    place = os.memfd_create("argus-check", os.MFD_CLOEXEC)
    try:
        os.pwrite(place, code.ljust(mmap.PAGESIZE, b"\0"), 0)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        runs = mmap.PROT_READ | mmap.PROT_EXEC
        address = libc.mmap(None, mmap.PAGESIZE, runs, mmap.MAP_PRIVATE, place, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            why = os.strerror(ctypes.get_errno())
            raise ArgusError(f"memory of this process cannot be run: {why}", "vm.memfd_noexec, or a policy, forbids it")
        file = open_file(f"/proc/self/fd/{place}")
    finally:
        os.close(place)
    (one,) = (mapping for mapping in executable_mappings(os.getpid()) if mapping.start == address)
    library = Library(one.path, file, one.device, one.inode, False, {"cuCtxSynchronize": 0}, ())
    return library, ctypes.CFUNCTYPE(ctypes.c_int)(address)


def probe_self(backend: Backend | None = None) -> State:
    """Loads the real programs, probes this very process, and counts what arrives.

    Args:
        backend: As for ``Probes``.
    """
    try:
        began = time.monotonic()
        probes = Probes(launch_ring_bytes=1 << 20, backend=backend)
    except ArgusError as failure:
        return State(False, failure.message, failure.hint)
    try:
        library, function = own_code()
        probes.add_target(os.getpid())
        attaching = Aside(partial(probes.attach, library, os.getpid()), "argus-check")
        if not attaching.wait(ATTACH_S):
            # A file of another process holds the kernel's lock (uprobes are put on one after the other).
            hint = "Another process holds up the kernel's uprobes: try again; argus trace goes on with what comes"
            return State(False, f"no probe came within {seconds(ATTACH_S)}", hint)
        attaching.result()
        loaded = time.monotonic() - began
        for _ in range(PROBE_CALLS):
            function()
        seen = probes.launches.drain()
        expected = calls.BY_SYMBOL["cuCtxSynchronize"].id
        whole = int(np.count_nonzero((seen["call"] == expected) & (seen["duration_ns"] >= 0)))
        if whole != PROBE_CALLS:
            return State(False, f"{whole} of {PROBE_CALLS} calls were seen by a probe on this process")
        way = "one link a library" if probes.backend == "multi" else "one perf event a function (Linux 6.6 is faster)"
        detail = (
            f"programs loaded in {seconds(loaded)}; "
            f"{whole} of {PROBE_CALLS} calls seen by a uprobe, entry and exit; {way}"
        )
        return State(True, detail)
    except ArgusError as failure:
        return State(False, failure.message, failure.hint)
    finally:
        probes.close()


def sample_self() -> State:
    """Samples this very process until a stack shows this function, by name."""
    began = time.monotonic()
    probes = StackProbes(rate_hz=997)
    python = None
    try:
        probes.add_target(os.getpid())
        interpreter = find_interpreter(os.getpid())
        if interpreter is None or interpreter.layout is None:
            state = "no CPython was found in this process" if interpreter is None else interpreter.state
            return State(False, state, "Stacks of other processes may work all the same")
        python = PythonProcess(os.getpid(), interpreter)
        resolver = CodeResolver(python, interpreter.layout)
        probes.set_python(os.getpid(), interpreter.layout)
        probes.set_threads(os.getpid(), python.thread_states())
        loaded = time.monotonic() - began
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            drained = probes.drain()
            for _, code in drained.codes:
                resolver.learn(code)
            for raw in drained.stacks:
                if any(frame is not None and frame.function == "sample_self" for frame in resolver.resolve(raw.frames)):
                    version = ".".join(map(str, interpreter.version[:2]))
                    off_cpu = probes.state["off-cpu"]
                    detail = (
                        f"programs loaded in {seconds(loaded)}; this process's own stack was read (CPython {version}); "
                        f"off-CPU times {off_cpu}"
                    )
                    return State(True, detail, partial=off_cpu.startswith("failed"))
        return State(False, "no sample of this process showed its own function within 5 s")
    finally:
        if python is not None:
            python.close()
        probes.close()


def _store_engine() -> State:
    if importlib.util.find_spec("chdb") is None:
        return State(
            False,
            "chdb, the embedded engine, is not installed",
            "pip install chdb, or --store clickhouse://HOST/DB",
        )
    # Not here: chdb reads settings from the current folder, where anybody may have put some.
    asked = subprocess.run(
        [sys.executable, "-c", "import chdb; print(chdb.query('SELECT version()', 'TSV'))"], cwd="/",
        env=child.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"it ended with {asked.returncode}"])[-1]
        return State(False, f"chdb, the embedded engine, does not run: {last}", "pip install --force-reinstall chdb")
    engine = asked.stdout.strip()
    return State(True, f"embedded: chdb {importlib.metadata.version('chdb')}, ClickHouse {engine}")


def _cupti() -> State:
    """What Argus itself needs. CUPTI is the process's own: `argus trace` reports per process whether it has one."""
    try:
        helper = build.library()
    except ArgusError as missing:
        return State(False, missing.message, missing.hint)
    if importlib.util.find_spec("cupti") is None:
        return State(False, "cupti-python, which decodes CUPTI's records, is not installed", "pip install cupti-python")
    version = importlib.metadata.version("cupti-python")
    return State(True, f"GPU times of armed processes (argus run, argus arm); cupti-python {version}, helper {helper}")


def _nvml() -> State:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return State(False, "no libnvidia-ml.so.1", "Install the NVIDIA driver")
    if nvml.nvmlInit_v2() != 0:
        return State(False, "libnvidia-ml is there but finds no driver", "Load the NVIDIA driver (nvidia-smi)")
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return State(True, f"{count.value} GPU(s)")
