"""How the records of each CUPTI version look, and what to ask CUPTI for.

Layouts, kinds, attributes and callback ids come from NVIDIA's ``cupti-python`` at run time; which generation of a
record a CUPTI version writes is data here. cupti-python itself always decodes the newest generation that it knows,
whatever the process has loaded.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.cupti import declared, shared
from argus.cupti.declared import Declared
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError

_PACKAGE = "cupti-python"
_ALL_GENERATIONS = "13.3.1"
"""The first cupti-python that knows generations older than its own CUPTI's."""

# The same in every version below: 12.4 to 13.5.
_COMMON = {
    "MEMCPY2": "memcpy_pto_p4",
    "RUNTIME": "api",
    "DRIVER": "api",
    "INTERNAL_LAUNCH_API": "api",
    "OVERHEAD": "overhead3",
    "JIT": "jit2",
    "MODULE": "module",
    "MARKER": "marker2",
}

# Newest version number of a group (cuptiGetVersion) -> kernel, memcpy, memset, synchronization. cuptiGetVersion counts
# from 22 (CUDA 12.4) to 28 (12.9 update 1), and is 10000 * major + 100 * minor + patch from 13.0 on. Generations by
# what the wheels of cupti-python declare: 12.6.0 (kernel9, memcpy5, memset4, synchronization), 12.8.0 (kernel9,
# memcpy6, memset4, synchronization2), 13.0.1, 13.2.0, 13.3.1, 13.4.0; 12.4, 12.5, 12.9, 13.1 and 13.5 by the newest
# that the headers of the wheels nvidia-cuda-cupti(-cu12) declare.
_FIRST = 22
_GENERATIONS: tuple[tuple[int, str, str, str, str], ...] = (
    (24, "kernel9", "memcpy5", "memset4", "synchronization"),
    (28, "kernel9", "memcpy6", "memset4", "synchronization2"),
    (130099, "kernel10", "memcpy6", "memset4", "synchronization2"),
    (130299, "kernel11", "memcpy6", "memset4", "synchronization2"),
    (130399, "kernel12", "memcpy6", "memset4", "synchronization2"),
    (130599, "kernel13", "memcpy7", "memset5", "synchronization2"),
)
_FIRST_OF_13 = 130000

# cupti-python's release in which a generation first appears; others come with _ALL_GENERATIONS.
_SINCE = {"kernel13": "13.4.0", "memcpy7": "13.4.0", "memset5": "13.4.0"}

_NAMES = {"CONCURRENT_KERNEL": ("name",), "KERNEL": ("name",), "MARKER": ("name", "domain"), "JIT": ("cache_path",)}
"""Fields that point at text."""

_DRIVER_12 = {22: "12.4", 23: "12.5", 24: "12.6", 26: "12.8", 27: "12.9", 28: "12.9"}

# Calls that put work on a GPU: their records have the time and the thread. The driver's own are for those who do
# without the runtime (Triton, NCCL).
_RUNTIME_CALLS = re.compile(
    r"cuda(LaunchKernel|LaunchKernelExC|LaunchCooperativeKernel|GraphLaunch"
    r"|Memcpy(2D|3D|Peer|3DPeer|Batch|3DBatch|WithAttributes|3DWithAttributes|ToSymbol|FromSymbol)?(Async)?"
    r"|Memset(2D|3D)?(Async)?)(_pt[ds][sz])?_v\d+"
)
# __cudaLaunchKernel and its _ptsz form, to which nvcc 13 compiles <<<>>>: cupti-python's enum leaves out what begins
# with two underscores, which are ids 505 and 506 between its neighbours.
_UNNAMED_RUNTIME_CALLS = [505, 506]
_DRIVER_CALLS = re.compile(r"cu(LaunchKernel|LaunchKernelEx|LaunchCooperativeKernel|GraphLaunch)(_ptsz)?")

_ZEROED_OUT_BUFFER_BYTES = 1


def version_text(version: int) -> str:
    """``cuptiGetVersion``'s number as people know it: 130200 -> "13.2"."""
    if version >= _FIRST_OF_13:
        return f"{version // 10000}.{version // 100 % 100}"
    return _DRIVER_12.get(version, f"of API version {version}")


class Layouts:
    """The records of one CUPTI version. Made by ``for_version``.

    Attributes:
        version: As cuptiGetVersion returns it.
        dtypes: By number of kind: how CUPTI's record looks.
        generations: By name of kind: which generation that is.
        names: By number of kind: byte offsets of pointers to text, at most two.
    """

    def __init__(self, version: int, known: Declared, generations: dict[str, str]) -> None:
        self.version = version
        self.generations = generations
        self.dtypes: dict[int, np.dtype[np.void]] = {}
        self.names: dict[int, tuple[int, ...]] = {}
        self._declared = known
        for kind, generation in generations.items():
            number = self.kind(kind)
            dtype = _dtype(known, generation, version)
            self.dtypes[number] = dtype
            fields: Mapping[str, Any] = dtype.fields or {}
            self.names[number] = tuple(fields[name][1] for name in _NAMES.get(kind, ()))

    def kind(self, name: str) -> int:
        """The number of a kind: ``CUPTI_ACTIVITY_KIND_<name>``."""
        return self._declared.kinds[name]

    def dtype(self, kind: int) -> np.dtype[np.void]:
        """How a record of this kind looks.

        Raises:
            KeyError: Argus does not know this kind.
        """
        return self.dtypes[kind]

    def table(self) -> NDArray[np.void]:
        """What the helper has to know. Shape (``shared.MAX_KINDS``,), dtype ``shared.LAYOUT``, by number of kind."""
        table = np.zeros(shared.MAX_KINDS, shared.LAYOUT)
        for kind, dtype in self.dtypes.items():
            table[kind]["size"] = dtype.itemsize
            for place, offset in enumerate(self.names[kind]):
                table[kind]["name"][place] = offset
        return table

    def kinds(self, api: bool = True, markers: bool = False, modules: bool = False) -> list[int]:
        """Kinds to enable, the one that matters most first.

        API records are not among them but for old versions: ``runtime_calls`` and ``driver_calls`` choose single calls.
        """
        wanted = ["CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET", "SYNCHRONIZATION", "OVERHEAD", "JIT"]
        if api and not self.chooses_calls:
            wanted += ["RUNTIME", "DRIVER"]
        if markers:
            wanted.append("MARKER")
        if modules:
            wanted.append("MODULE")
        return [self.kind(name) for name in wanted]

    @property
    def chooses_calls(self) -> bool:
        """Whether CUPTI can record single API calls: cuptiActivityEnableRuntimeApi came with 12.5."""
        return self.version >= 23

    def runtime_calls(self) -> list[int]:
        """Callback ids of the runtime's calls that launch, copy and fill."""
        unnamed = _UNNAMED_RUNTIME_CALLS if self.version >= _FIRST_OF_13 else []
        return self._declared.runtime_calls[: shared.MAX_CALLBACKS - 2] + unnamed

    def driver_calls(self) -> list[int]:
        """Callback ids of the driver's calls that launch."""
        return self._declared.driver_calls[: shared.MAX_CALLBACKS]

    def attributes(self) -> NDArray[np.void]:
        """Attributes to set. Dtype ``shared.ATTRIBUTE``."""
        # Argus hands out zeroed buffers; else CUPTI would zero them in the thread that launches.
        return np.array([(self._declared.zeroed_out_buffer, _ZEROED_OUT_BUFFER_BYTES, 1)], shared.ATTRIBUTE)

    def kind_name(self, kind: int) -> str:
        """The name of a kind, or its number."""
        return next((name for name in self.generations if self.kind(name) == kind), str(kind))

    @property
    def thread_object(self) -> int:
        """CUPTI_ACTIVITY_OBJECT_THREAD: the object id of a record is a process and a thread."""
        return self._declared.thread_object


def for_version(version: int) -> Layouts:
    """The layouts of the CUPTI that a process has loaded.

    Args:
        version: As cuptiGetVersion returns it.

    Raises:
        ArgusError: Argus does not know this version, or cupti-python is missing or does not know its records.
    """
    return _for_version(version)


@lru_cache(maxsize=16)
def _for_version(version: int) -> Layouts:
    return Layouts(version, load(), generations(version))


def generations(version: int) -> dict[str, str]:
    """Which generation of each record a CUPTI version writes, by name of kind.

    Raises:
        ArgusError: Argus does not know this version.
    """
    last = _GENERATIONS[-1][0]
    if version > last:
        raise ArgusError(
            f"CUPTI {version_text(version)} is newer than this Argus knows (up to {version_text(last)})",
            "Upgrade Argus, or use an older CUPTI in the process",
            EXIT_UNAVAILABLE,
        )
    if version < _FIRST:
        raise ArgusError(
            f"CUPTI {version_text(version)} is older than this Argus knows (from {version_text(_FIRST)})",
            "Use CUDA 12.4 or later",
            EXIT_UNAVAILABLE,
        )
    # There was no 12.7: number 25 belongs to no release.
    if version == 25 or _GENERATIONS[1][0] < version < _FIRST_OF_13:
        raise ArgusError(f"CUPTI reports version {version}, which no release has", "", EXIT_UNAVAILABLE)
    _, kernel, memcpy, memset, synchronization = next(group for group in _GENERATIONS if version <= group[0])
    return {
        "CONCURRENT_KERNEL": kernel,
        "KERNEL": kernel,
        "MEMCPY": memcpy,
        "MEMSET": memset,
        "SYNCHRONIZATION": synchronization,
        **_COMMON,
    }


def load() -> Declared:
    """What cupti-python declares, asked for once: half a second.

    Raises:
        ArgusError: It is not installed, or does not load.
    """
    found = _asked()
    if isinstance(found, Declared):
        return found
    raise ArgusError(
        f"{_PACKAGE} cannot be imported ({found})",
        f"Install it: pip install '{_PACKAGE}>={_ALL_GENERATIONS}'",
        EXIT_UNAVAILABLE,
    )


@lru_cache(maxsize=1)
def _asked() -> Declared | str:
    """Also a failure is remembered: the loop asks for each process. ``load_ahead`` asks again later."""
    generations = sorted({*_COMMON.values(), *(name for _, *names in _GENERATIONS for name in names)})
    try:
        return declared.ask(generations, _RUNTIME_CALLS.pattern, _DRIVER_CALLS.pattern)
    except Exception as reason:  # an answer without sense, a package that is being replaced
        return (str(reason).splitlines() or [type(reason).__name__])[-1]


_loader: threading.Thread | None = None
_asked_s = 0.0
_AGAIN_S = 600.0
"""When it was asked in a thread, and how long after that it is asked again if it failed (the node was too busy)."""


def load_ahead() -> bool:
    """Begins to ask cupti-python in a thread of its own. Returns whether it is done, so that ``load`` is quick."""
    global _loader, _asked_s
    now = time.monotonic()
    if _loader is not None and _loader.is_alive():
        return False
    if _asked.cache_info().currsize and (now - _asked_s < _AGAIN_S or isinstance(_asked(), Declared)):
        return True
    _asked.cache_clear()
    _asked_s = now
    _loader = threading.Thread(target=_asked, name="argus-cupti-python", daemon=True)
    _loader.start()
    return False


def _dtype(known: Declared, generation: str, version: int) -> np.dtype[np.void]:
    """The dtype of a generation.

    Raises:
        ArgusError: This cupti-python does not know it.
    """
    dtype = known.dtypes.get(generation)
    if dtype is None:
        needed = _SINCE.get(generation, _ALL_GENERATIONS)
        raise ArgusError(
            f"the installed {_PACKAGE} does not know the records of CUPTI {version_text(version)} ({generation})",
            f"Install a newer one: pip install '{_PACKAGE}>={needed}'",
            EXIT_UNAVAILABLE,
        )
    return dtype
