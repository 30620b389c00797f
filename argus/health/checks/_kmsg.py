"""The kernel log: records of /dev/kmsg, newest of some hours."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator

from argus.health.check import Absent, Blind, Look

_HEAD = re.compile(r"([0-9]{1,10}),[0-9]{1,20},(-?[0-9]{1,20})(?:,|$)")
"""Facility and level, number, and time, us."""
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")
"""A byte that is no printable ASCII, and the backslash (kernel/printk/printk.c)."""
_OF_PROCESSES = re.compile(
    r".{0,15}(\[\d+\]:? | ?\(\d+\)[ :]|/\d+: | invoked oom-killer: | uses obsolete |: (page allocation|vmalloc)[ :]"
    r"|: packet size is |: attempt to access beyond |: sending ioctl )"
    r"|traps: |audit: |[Pp]rocess [`']|warning: `|coredump: |[^\s:/]{1,15}: renamed from "
    r"|.{0,127}IN=\S* OUT=\S* .*SRC=\S+ DST=\S+ LEN=\d+ ",
    re.DOTALL,
)
"""Crashes and the like: what a process is called (15 bytes, any), and files that it maps, are anybody's choice
(arch/x86/kernel/traps.c, arch/x86/mm/fault.c, mm/oom_kill.c, mm/page_alloc.c, net/packet/af_packet.c, block/blk-core.c
of Linux); so are what a packet filter writes before its lines, and names of network interfaces."""


def messages(look: Look, hours: float) -> Iterator[tuple[float, str]]:
    """Age in s and text of each record, oldest first (Documentation/ABI/testing/dev-kmsg): what the kernel says of
    itself and its devices, not what programs wrote there, nor lines that begin with what a process is called.

    Raises:
        Absent, Blind: There is no kernel log, or it may not be read.
    """
    look.note(f"reading {look.kmsg}")
    try:
        log = os.open(look.kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Absent(f"there is no {look.kmsg}") from None
    except OSError as failure:
        raise Blind(f"the kernel log may not be read ({failure.strerror}): run it as root") from None
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    records = 0
    try:
        for line in _lines(log):
            head, _, text = line.partition(";")
            if (fields := _HEAD.match(head)) is None:
                continue  # a continuation: KEY=value
            records += 1
            text = _ESCAPED.sub(lambda byte: chr(int(byte[1], 16)), text)
            if int(fields[1]) >> 3 or _OF_PROCESSES.match(text):
                continue
            age = now - int(fields[2]) / 1e6
            if age <= hours * 3600:
                yield max(age, 0.0), text
    finally:
        os.close(log)
    if not records:  # a running kernel has logged something: this is another file, as containers have it
        raise Blind(f"{look.kmsg} has no kernel messages in it: is it the kernel log?")


def _lines(log: int) -> Iterator[str]:
    rest = b""
    while True:
        try:
            part = os.read(log, 65536)  # the device gives one record a read
        except BrokenPipeError:
            continue  # overwritten meanwhile: go on with the oldest that is left
        except OSError as failure:
            if failure.errno == errno.EAGAIN:
                return
            raise Blind(f"reading the kernel log: {failure.strerror}") from None
        if not part:
            break
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
