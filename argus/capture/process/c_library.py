"""Where a process has the functions of its C library that an injection calls (``argus.cupti.interrupt``)."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from argus.capture.process.elf import Elf, NotElf
from argus.capture.process.mapped import open_mapped
from argus.capture.process.targets import executable_mappings
from argus.capture.reader import reader
from argus.capture.reader.reader import Answer, integers

_LIBRARY = re.compile(r"^lib(c|dl)(\.so\.\d+|-2\.\d+\.so)$")
_SIGRETURN = bytes.fromhex("48c7c00f0000000f05")
"""mov $15, %rax; syscall: the C library's __restore_rt, which every signal handler returns to."""
_MOST_CODE = 32 << 20
"""Of a C library that is searched: glibc has 2 MB."""


@dataclass(frozen=True)
class Functions:
    """Addresses in a process: of ``dlopen``, of ``syscall``, and of the C library's return from a signal handler."""

    dlopen: int
    syscall: int
    sigreturn: int


def find_functions(pid: int) -> Functions | None:
    """The functions of a process; None: it has no glibc that Argus understands.

    Raises:
        OSError: It has ended, or may not be looked at.
    """
    if reader.shared.on:
        return reader.checked(reader.shared.ask("c_library", pid), _functions)  # type: ignore[no-any-return]
    dlopen = syscall = sigreturn = 0
    # dlopen moved from libdl to libc in glibc 2.34; where both have it they are one.
    for mapping in executable_mappings(pid):
        name = Path(mapping.path).name
        if not _LIBRARY.match(name):
            continue
        with contextlib.suppress(NotElf, OSError):
            file = open_mapped(pid, mapping)
            offsets = Elf(file).functions(["dlopen", "syscall"])
            within = range(mapping.offset, mapping.offset + mapping.end - mapping.start)
            addresses = {name: mapping.start + at - mapping.offset for name, at in offsets.items() if at in within}
            dlopen = addresses.get("dlopen", dlopen)
            syscall = addresses.get("syscall", syscall)
            if name.startswith("libc") and not sigreturn:
                at = file.read(min(mapping.end - mapping.start, _MOST_CODE), mapping.offset).find(_SIGRETURN)
                sigreturn = mapping.start + at if at >= 0 else 0
    return Functions(dlopen, syscall, sigreturn) if dlopen and syscall and sigreturn else None


def _functions(answer: Answer) -> Functions | None:
    found = answer.what["found"]
    return None if found is None else Functions(*integers(found))
