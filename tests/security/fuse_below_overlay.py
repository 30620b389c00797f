"""A file system in user space below an overlay, as any user may mount it in a user namespace of his own: the kernel
opens its files with his rights, so that root's requests are served as well.

Arguments: the device, a folder to mount below, the file that is shown, a file that says what is not answered (words of
a PID, a colon and the number of an operation), and how many processes map the file. Writes the PIDs of these, one a
line, and ends with its input.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fuse_folder import answer

_MAPS = (
    "import mmap, os, sys, time\n"
    "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
    "mapped = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)\n"
    "os.close(fd)\nprint('mapped', flush=True)\ntime.sleep(1000)\n"
)


def serve(device: int, shown: Path, silent: Path) -> None:
    """Answers what is asked, but for what ``silent`` says."""
    content, name = shown.read_bytes(), os.fsencode(shown.name)
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:
            return
        _, operation, unique, node, _, _, pid = struct.unpack_from("<2I2Q3I", request)
        found = answer(operation, node, request[40:], name, content)
        if found is None or (silent.exists() and f"{pid}:{operation}" in silent.read_text().split()):
            continue
        body, error = (b"", found) if isinstance(found, int) else (found, 0)
        os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


def main(words: Sequence[str]) -> None:
    device, folder, shown = os.open(words[0], os.O_RDWR), Path(words[1]), Path(words[2])
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, where: Path, kind: str, options: str) -> None:
        if libc.mount(source.encode(), os.fsencode(where), kind.encode(), 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), f"mount {kind}")

    mount("tmpfs", folder, "tmpfs", "")
    for name in ("below", "upper", "work", "merged"):
        (folder / name).mkdir()
    mount("argus-test", folder / "below", "fuse", f"fd={device},rootmode=40000,user_id=0,group_id=0")
    threading.Thread(target=serve, args=(device, shown, Path(words[3])), daemon=True).start()
    places = ",".join(f"{what}={folder / name}" for what, name in (
        ("lowerdir", "below"), ("upperdir", "upper"), ("workdir", "work"),
    ))  # fmt: skip
    mount("overlay", folder / "merged", "overlay", f"{places},userxattr")
    command = [sys.executable, "-I", "-S", "-c", _MAPS, str(folder / "merged" / shown.name)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(int(words[4]))]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"mapped\n":
                raise OSError("it could not be mapped")
            print(process.pid, flush=True)
        sys.stdin.read()
    finally:
        for process in processes:
            process.kill()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
