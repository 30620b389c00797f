"""A file system in user space with one file, by the kernel's own protocol (include/uapi/linux/fuse.h): stopped by a
signal, it is one that does not answer any more.

Arguments: where to mount it, the file that it shows there, under the same name, and a file that holds for how many
seconds each read waits ("inf": none is answered, and other requests are), if there is one. Writes a line once it is
mounted, and ends with its mount.
"""

from __future__ import annotations

import ctypes
import math
import os
import stat
import struct
import sys
import time
from pathlib import Path

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 34, 36, 38, 42
ENOENT, ENOSYS = 2, 38


def attributes(node: int, size: int) -> bytes:
    mode, links = (stat.S_IFDIR | 0o755, 2) if node == 1 else (stat.S_IFREG | 0o755, 1)
    return struct.pack("<6Q10I", node, size, size // 512 + 1, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)


def answer(operation: int, node: int, body: bytes, name: bytes, content: bytes) -> bytes | int | None:
    """Bytes; an error; None: no answer is due."""
    size = 0 if node == 1 else len(content)
    if operation in (FORGET, BATCH_FORGET, INTERRUPT):
        return None
    if operation == INIT:
        _, _, readahead, _ = struct.unpack_from("<4I", body)
        return struct.pack("<4I2H2I2H8I", 7, 31, readahead, 0, 12, 9, 1 << 17, 1, 0, 0, *[0] * 8)
    if operation == LOOKUP:
        if body.rstrip(b"\0") != name:
            return -ENOENT
        return struct.pack("<4Q2I", 2, 0, 0, 0, 0, 0) + attributes(2, len(content))
    if operation == GETATTR:
        return struct.pack("<Q2I", 0, 0, 0) + attributes(node, size)
    if operation in (OPEN, OPENDIR):
        return struct.pack("<Q2I", 0, 0, 0)
    if operation == READ:
        _, offset, count = struct.unpack_from("<2QI", body)
        return content[offset : offset + count]
    if operation == STATFS:
        return struct.pack("<5Q10I", *[0] * 5, 4096, 255, 4096, *[0] * 7)
    if operation in (RELEASE, RELEASEDIR, FLUSH, ACCESS, DESTROY, READDIR):
        return b""
    return -ENOSYS


def main() -> None:
    where, shown = sys.argv[1], Path(sys.argv[2])
    content, name = shown.read_bytes(), os.fsencode(shown.name)
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"argus-test", os.fsencode(where), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:
            return  # it was unmounted
        _, operation, unique, node = struct.unpack_from("<2I2Q", request)
        found = answer(operation, node, request[40:], name, content)
        if found is None:
            continue
        if operation == READ and len(sys.argv) > 3 and os.path.exists(sys.argv[3]):
            if (seconds := float(Path(sys.argv[3]).read_text())) == math.inf:
                continue
            time.sleep(seconds)
        body, error = (b"", found) if isinstance(found, int) else (found, 0)
        os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


if __name__ == "__main__":
    main()
