"""BPF programs and maps in the kernel, through bpf(2): bcc compiles them (``compile``), and is not needed here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel.compile import BY_DESCRIPTOR, LOAD_64, Compiled, MapSpec
from argus.system.syscalls import SYS_BPF, bpf, system_call

# enum bpf_cmd of include/uapi/linux/bpf.h.
_BPF_MAP_CREATE = 0
_BPF_MAP_LOOKUP_ELEM = 1
_BPF_MAP_UPDATE_ELEM = 2
_BPF_MAP_DELETE_ELEM = 3
_BPF_PROG_LOAD = 5
_BPF_OBJ_GET_INFO_BY_FD = 15
_BPF_RAW_TRACEPOINT_OPEN = 17
_BPF_MAP_LOOKUP_BATCH = 24
_BPF_MAP_LOOKUP_AND_DELETE_BATCH = 25
_BPF_MAP_UPDATE_BATCH = 26

# enum bpf_prog_type.
KPROBE: Final = 2
PERF_EVENT: Final = 7
RAW_TRACEPOINT: Final = 17

# enum bpf_map_type: those with a value for each CPU.
_PER_CPU = (5, 6, 10)

_NAME_BYTES = 15
"""``BPF_OBJ_NAME_LEN`` without its 0."""
_LOG_BYTES = 16 << 20
"""``UINT_MAX >> 8``, the most that kernels before 6.0 take, and the verifier's last words fit."""

# How much the verifier says: include/linux/bpf_verifier.h.
LOG_ALL: Final = 1
LOG_STATISTICS: Final = 4

INSTRUCTION = np.dtype([("code", "u1"), ("registers", "u1"), ("offset", "<i2"), ("value", "<i4")])
"""``struct bpf_insn``; the source register is in the upper half of its byte."""

_PROGRAM_INFO_BYTES = 224
_RUN_TIME_AT = 192
"""Of run_time_ns in struct bpf_prog_info; run_cnt follows."""

_ATTEMPTS = 10
"""How often a program is given to the kernel whose verifier a signal interrupts (EAGAIN); libbpf tries it 5 times."""


class LoadError(OSError):
    """The kernel refuses a program.

    Attributes:
        log: The verifier's messages.
    """

    log: str = ""


def attach_raw_tracepoint(name: str, program: int) -> int:
    """Lets a loaded program run at a raw tracepoint, until the descriptor that is returned is closed."""
    text = ctypes.create_string_buffer(name.encode())
    return bpf(_BPF_RAW_TRACEPOINT_OPEN, struct.pack("<QII", ctypes.addressof(text), program, 0))


def cpus_of(text: str) -> list[int]:
    """CPUs of a list as the kernel writes it: "0-3,8"."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


@cache
def _possible_cpus() -> int:
    return len(cpus_of(Path("/sys/devices/system/cpu/possible").read_text()))


class _Batch(ctypes.Structure):
    """``union bpf_attr``, the part for batches of map entries."""

    _fields_ = (
        ("in_batch", ctypes.c_uint64),
        ("out_batch", ctypes.c_uint64),
        ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("map_fd", ctypes.c_uint32),
        ("elem_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class Map:
    """A map. Keys and values are bytes, or integers of the map's size.

    Attributes:
        fd: Its descriptor.
        spec: What it is made of.
    """

    def __init__(self, spec: MapSpec) -> None:
        self.spec = spec
        name = spec.name.encode()[:_NAME_BYTES]
        attributes = struct.pack(
            "<7I16s", spec.kind, spec.key_bytes, spec.value_bytes, spec.entries, spec.flags, 0, 0, name
        )
        self.fd = bpf(_BPF_MAP_CREATE, attributes)
        per_cpu = spec.kind in _PER_CPU
        self._value_bytes = -(-spec.value_bytes // 8) * 8 * _possible_cpus() if per_cpu else spec.value_bytes
        self._keys: NDArray[np.uint8] | None = None

    def _element(self, command: int, key: int | bytes, value: ctypes.Array[ctypes.c_char] | None = None) -> bool:
        """Whether there is such an entry."""
        if isinstance(key, int):
            key = key.to_bytes(self.spec.key_bytes, sys.byteorder)
        if len(key) != self.spec.key_bytes:
            raise ValueError(f"{self.spec.name}: a key has {self.spec.key_bytes} bytes, not {len(key)}")
        where = ctypes.create_string_buffer(key, len(key))
        what = 0 if value is None else ctypes.addressof(value)
        try:
            bpf(command, struct.pack("<IIQQQ", self.fd, 0, ctypes.addressof(where), what, 0))
        except OSError as reason:
            if reason.errno == errno.ENOENT:
                return False
            raise
        return True

    def get(self, key: int | bytes) -> bytes | None:
        """A value, or None. Of a map with values for each CPU: those of all CPUs that there could be, each rounded up
        to 8 bytes."""
        value = ctypes.create_string_buffer(self._value_bytes)
        return value.raw if self._element(_BPF_MAP_LOOKUP_ELEM, key, value) else None

    def total(self, key: int) -> int:
        """Of a map with a counter for each CPU: their sum."""
        return int(np.frombuffer(self.get(key) or b"", "<u8").sum())

    def set(self, key: int | bytes, value: int | bytes) -> None:
        """Sets a value.

        Raises:
            OSError: The map is full (E2BIG).
        """
        if isinstance(value, int):
            value = value.to_bytes(self.spec.value_bytes, sys.byteorder)
        if len(value) != self._value_bytes:
            raise ValueError(f"{self.spec.name}: a value has {self._value_bytes} bytes, not {len(value)}")
        self._element(_BPF_MAP_UPDATE_ELEM, key, ctypes.create_string_buffer(value, len(value)))

    def delete(self, key: int | bytes) -> bool:
        """Forgets an entry. Returns whether there was one."""
        return self._element(_BPF_MAP_DELETE_ELEM, key)

    def read(self, *, delete: bool = False) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """All entries of a hash map: keys (n, key bytes), values (n, value bytes). Views that the next call
        overwrites."""
        if self._keys is None:
            # A batch must hold the fullest bucket: room for all entries always does. What is not used costs nothing.
            self._keys = np.empty((self.spec.entries, self.spec.key_bytes), np.uint8)
            self._values = np.empty((self.spec.entries, self._value_bytes), np.uint8)
        cursor = ctypes.create_string_buffer(8)
        taken, begun, size = 0, False, len(self._keys)
        while taken < size:
            request = _Batch(
                in_batch=ctypes.addressof(cursor) if begun else 0,
                out_batch=ctypes.addressof(cursor),
                keys=self._keys[taken:].ctypes.data,
                values=self._values[taken:].ctypes.data,
                count=size - taken,
                map_fd=self.fd,
            )
            command = _BPF_MAP_LOOKUP_AND_DELETE_BATCH if delete else _BPF_MAP_LOOKUP_BATCH
            try:
                system_call(SYS_BPF, command, ctypes.byref(request), ctypes.sizeof(request))
            except OSError as reason:
                if reason.errno == errno.ENOENT:  # this was the last of them
                    taken += request.count
                    break
                if reason.errno == errno.EINTR:
                    continue
                raise
            taken += request.count
            begun = True
            if request.count == 0:
                break
        return self._keys[:taken], self._values[:taken]

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> int:
        """Sets many entries of a hash map. Returns how many found room."""
        request = _Batch(keys=keys.ctypes.data, values=values.ctypes.data, count=len(keys), map_fd=self.fd)
        try:
            system_call(SYS_BPF, _BPF_MAP_UPDATE_BATCH, ctypes.byref(request), ctypes.sizeof(request))
        except OSError as reason:
            if reason.errno not in (errno.E2BIG, errno.ENOMEM):
                raise
        return int(request.count)


class Module:
    """The maps of compiled programs, and those of the programs that were loaded.

    Attributes:
        programs: Name -> descriptor.

    Raises:
        OSError: The kernel refuses a map.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.programs: dict[str, int] = {}
        self._maps: dict[str, Map] = {}
        try:
            for spec in compiled.maps:
                self._maps[spec.name] = Map(spec)
        except BaseException:
            self.close()
            raise
        self._fds = np.array([self._maps[spec.name].fd for spec in compiled.maps], np.int32)

    def __getitem__(self, name: str) -> Map:
        return self._maps[name]

    def load(self, name: str, kind: int, expected_attach_type: int = 0) -> int:
        """Has the kernel verify a program and take it. A second time, the first one's descriptor.

        Raises:
            LoadError: It refuses.
        """
        attempts = 0
        while name not in self.programs:
            try:
                self.programs[name] = self._request(name, kind, expected_attach_type)
            except OSError as reason:
                attempts += 1
                if reason.errno == errno.EAGAIN and attempts < _ATTEMPTS:
                    continue
                refusal = LoadError(reason.errno, f"program {name}: {reason.strerror}")
                refusal.log = self.verifier_log(name, kind, expected_attach_type)
                raise refusal from reason
        return self.programs[name]

    def verifier_log(self, name: str, kind: int, expected_attach_type: int = 0, level: int = LOG_ALL) -> str:
        """What the verifier says of a program, which is not kept.

        Args:
            name, kind, expected_attach_type: As for ``load``.
            level: ``LOG_ALL`` or ``LOG_STATISTICS``.
        """
        log = ctypes.create_string_buffer(_LOG_BYTES)
        with contextlib.suppress(OSError):
            os.close(self._request(name, kind, expected_attach_type, log, level))
        return log.value.decode(errors="replace")

    def _request(
        self, name: str, kind: int, expected: int, log: ctypes.Array[ctypes.c_char] | None = None, level: int = 0
    ) -> int:
        """A descriptor of the program."""
        code = np.frombuffer(self._compiled.programs[name], INSTRUCTION).copy()
        named = (code["code"] == LOAD_64) & (code["registers"] >> 4 == BY_DESCRIPTOR)
        code["value"][named] = self._fds[code["value"][named]]
        license_text = ctypes.create_string_buffer(self._compiled.license.encode())
        return bpf(
            _BPF_PROG_LOAD,
            struct.pack(
                "<IIQQIIQII16sII",
                *(kind, len(code), code.ctypes.data, ctypes.addressof(license_text)),
                *((0, 0, 0) if log is None else (level, len(log), ctypes.addressof(log))),
                *(0, 0, name.encode()[:_NAME_BYTES], 0, expected),
            ),
        )

    def run_times(self) -> dict[str, tuple[int, int]]:
        """Time that each program has run for, ns, and how often, where the kernel measures it; else 0. What it goes
        over to (tail calls) counts as its own."""
        times = {}
        for name, fd in self.programs.items():
            info = ctypes.create_string_buffer(_PROGRAM_INFO_BYTES)
            bpf(_BPF_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
            times[name] = struct.unpack_from("<QQ", info.raw, _RUN_TIME_AT)
        return times

    def unload(self) -> None:
        """Lets go of all programs; the maps stay."""
        for fd in self.programs.values():
            os.close(fd)
        self.programs.clear()

    def close(self) -> None:
        """Lets go of programs and maps. What is attached keeps them until it is closed too."""
        self.unload()
        for table in self._maps.values():
            os.close(table.fd)
        self._maps.clear()
