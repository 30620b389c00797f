"""What the kernel's proc connector says, as it comes over the socket."""

from __future__ import annotations

import struct

from argus.capture.process.forks import forks_of


def message(what: int, parent: int, thread: int, child: int) -> bytes:
    """struct nlmsghdr, struct cn_msg, struct proc_event with its union of 24 bytes (linux/cn_proc.h)."""
    event = struct.pack("=IIQIIII8x", what, 0, 1, parent + 1, parent, thread, child)
    packet = struct.pack("=IIIIHH", 1, 1, 0, 0, len(event), 0) + event
    return struct.pack("=IHHII", 16 + len(packet), 3, 0, 0, 0) + packet


def test_forks_are_distinguished_from_threads_and_other_events() -> None:
    fork, thread, executed = message(1, 100, 200, 200), message(1, 100, 300, 200), message(2, 100, 200, 200)
    assert forks_of(fork + thread + executed + message(1, 7, 8, 8)) == [(100, 200), (7, 8)]


def test_what_is_no_message_ends_nothing() -> None:
    fork = message(1, 100, 200, 200)
    assert forks_of(b"") == []
    for cut in range(len(fork)):
        assert forks_of(fork[:cut]) in ([], [(100, 200)])
    assert len(forks_of(bytes(1 << 12))) == 0
    assert len(forks_of(b"\xff" * (1 << 12))) == 0
