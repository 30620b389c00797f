"""The name of this node, as rows have it."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

VARIABLE = "ARGUS_HOST"
"""Names the node where its own name does not."""
LONGEST = 255
"""Characters of a host name (POSIX: HOST_NAME_MAX)."""
COMMON = frozenset({"", "(none)", "localhost", "localhost4", "localhost6", "ubuntu", "debian"})
"""Names, before the first dot, that installers give and many nodes keep. Rows of two nodes that share a name would be
taken for one node's, with one clock."""
_DIGITS = 6


def host_name(given: str = "") -> str:
    """``given``, else what :data:`VARIABLE` says, else the kernel's name of the node; a common one has digits of a hash
    of the machine behind it (localhost-3f2a1c), the same after a reboot."""
    name = given or os.environ.get(VARIABLE, "").strip()
    if name:
        return _printable(name)
    name = _printable(socket.gethostname())
    if name.partition(".")[0].lower() not in COMMON:
        return name
    return f"{name.strip('()') or 'node'}-{machine_digits()}"


def _printable(name: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in name[:LONGEST])


def machine_digits(root: Path = Path("/")) -> str:
    """Digits that differ between machines: of the network cards' addresses and the machine's id. Where no card is seen,
    as in a container, the id may be its image's, which others have too: then of this boot besides."""
    found = [_line(root / "etc/machine-id")]
    cards = root / "sys/class/net"
    try:
        devices = sorted(one for one in cards.iterdir() if (one / "device").exists())
    except OSError:
        devices = []
    addresses = [_line(one / "address") for one in devices]
    found += addresses if any(addresses) else [_line(root / "proc/sys/kernel/random/boot_id")]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:_DIGITS]


def _line(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.readline(256).strip()
    except OSError:
        return ""
