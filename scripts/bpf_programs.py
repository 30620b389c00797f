"""Gives every BPF program of Argus to this kernel, each for every way that it is attached, and lets them work: this
process's own calls and its own stack must be seen. scripts/compilers and scripts/kernels_guest.py run it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from argus.capture import probes, sampler
from argus.capture.kernel.compile import INSTRUCTION_BYTES, Compiled
from argus.capture.kernel.links import Backend
from argus.capture.kernel.programs import LOG_STATISTICS, LoadError, Module
from argus.live import preflight
from argus.model.errors import ArgusError

Report = Callable[..., None]
"""Called with a step's name, and what came of it by name."""
TASKS = {"multi": "uprobes, multi link", "perf": "uprobes, perf events", "": "stacks"}
"""Ways to attach, as the rows and the table name them."""
NO_STATE, NO_TYPES = "stacks before 5.18", "stacks without BTF"
"""Other compilations of those: as for kernels whose sched_switch has no state, and that have no BTF."""


class Watched(Module):
    """Reports of each program what the verifier made of it."""

    made: ClassVar[list[Watched]] = []
    backend: ClassVar[str] = ""
    """The way to attach that is tried."""
    report: ClassVar[Report]
    changed: ClassVar[Callable[[Compiled], Compiled]] = staticmethod(lambda compiled: compiled)

    def __init__(self, compiled: Compiled) -> None:
        super().__init__(type(self).changed(compiled))
        self.sizes = {name: len(code) // INSTRUCTION_BYTES for name, code in compiled.programs.items()}
        self.tried: set[str] = set()
        self.made.append(self)

    def load(self, name: str, kind: int, expected_attach_type: int = 0) -> int:
        if name in self.programs:
            return self.programs[name]
        self.tried.add(name)
        row: dict[str, Any] = {"program": name, "backend": self.backend, "instructions": self.sizes[name]}
        began = time.monotonic()
        try:
            fd = super().load(name, kind, expected_attach_type)
        except LoadError as refusal:
            lines = [line for line in refusal.log.splitlines() if line.strip()]
            type(self).report("program", **row, loaded=False, output="\n".join([str(refusal), *lines[-12:]]))
            raise
        row["seconds"] = round(time.monotonic() - began, 2)
        statistics = self.verifier_log(name, kind, expected_attach_type, LOG_STATISTICS)
        processed = re.search(r"processed (\d+) insns", statistics)
        type(self).report("program", **row, loaded=True, verified=int(processed.group(1)) if processed else 0)
        return fd

    def close(self) -> None:
        """The rest is still to be tried; the process ends soon."""


@contextlib.contextmanager
def watched(report: Report) -> Iterator[type[Watched]]:
    """While it lasts, what Argus loads is reported."""
    Watched.report = staticmethod(report)
    Watched.made.clear()
    before = probes.Module
    probes.Module = Watched  # type: ignore[misc]
    try:
        yield Watched
    finally:
        probes.Module = before  # type: ignore[misc]
        for module in Watched.made:
            Module.close(module)
        Watched.made.clear()


def load_probes() -> None:
    """The programs of CUDA, NCCL and PyTorch calls: loaded for each way to attach, attached, and hit."""
    backends: list[Backend] = ["perf"] if probes.kernel_version() < (6, 6) else ["multi", "perf"]
    for backend in backends:
        Watched.backend = backend
        state = preflight.probe_self(backend)
        Watched.report("probes", backend=backend, on=state.on, detail=state.detail)


def load_sampler() -> None:
    """The programs of the stack sampler: loaded, attached, and hit on the CPU and off it."""
    Watched.backend = ""
    try:
        state = preflight.sample_self()
        Watched.report("sampler", on=state.on and not state.partial, detail=state.detail)
    except ArgusError as failure:
        Watched.report("sampler", on=False, detail=failure.message)


def variants() -> None:
    """The same, compiled as for other kernels than this."""
    types = sampler.StackProbes._types

    def without_state(path: Path) -> tuple[dict[str, int], str]:
        found, why = types(path)
        return {**found, "ARGUS_PREV_STATE": 0}, why

    absent = "off: the kernel has no BTF"
    for name, substitute in ((NO_STATE, without_state), (NO_TYPES, lambda path: ({}, absent))):
        Watched.backend = name
        sampler.StackProbes._types = staticmethod(substitute)  # type: ignore[method-assign]
        try:
            sampler.StackProbes().close()
        except ArgusError as failure:
            Watched.report("sampler", on=False, detail=failure.message)
        finally:
            sampler.StackProbes._types = staticmethod(types)  # type: ignore[method-assign]


def everything_loaded() -> None:
    """Loads what was not, and reports programs that the sources lack."""
    for kinds in (probes.PROGRAMS, sampler.PROGRAMS):
        made = [module for module in Watched.made if module.sizes.keys() & kinds.keys()]
        for module in made:
            for name in sorted(module.sizes.keys() - module.tried):
                with contextlib.suppress(LoadError):
                    module.load(name, kinds[name])
        if lacking := kinds.keys() - {name for module in made for name in module.sizes}:
            Watched.report("failed", what=f"not compiled: {', '.join(sorted(lacking))}")
