"""What is given back of a process's memory, and what is not."""

from __future__ import annotations

import subprocess
import sys

from argus.system import memory

SMAPS = """\
7f0000000000-7f0000002000 r--p 00000000 08:01 77                         /usr/lib/lib a.so
Rss:                   8 kB
Anonymous:             0 kB
7f0000002000-7f0000005000 r-xp 00002000 08:01 77                         /usr/lib/lib a.so
Anonymous:             0 kB
7f0000005000-7f0000006000 r--p 00005000 08:01 77                         /usr/lib/lib a.so
Anonymous:             4 kB
7f0000006000-7f0000007000 rw-p 00006000 08:01 77                         /usr/lib/lib a.so
Anonymous:             0 kB
7f0000007000-7f0000008000 r--s 00000000 08:01 77                         /usr/lib/lib a.so
Anonymous:             0 kB
7f0000008000-7f0000009000 r--p 00000000 08:01 78                         /data/no library
Anonymous:             0 kB
7f0000009000-7f000000a000 r-xp 00000000 00:00 0
Anonymous:             0 kB
7f000000a000-7f000000b000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f000000b000-7f000000c000 r-xp 00000000 08:01 79                         /usr/lib/patched.so
Anonymous:             4 kB
"""


def test_only_what_a_file_gives_back_is_let_go() -> None:
    assert memory._unchanged(SMAPS) == [(0x7F0000000000, 0x2000), (0x7F0000002000, 0x3000)]


def test_libraries_that_are_let_go_work_on() -> None:
    """Beside a thread that uses them all the time."""
    code = """
import re, threading
from pathlib import Path
import numpy as np
from scipy import special
from argus.system import memory

def of_files():
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\\s+(\\d+)", text)[1])

matrix = np.arange(40_000.0).reshape(200, 200) % 7 + np.eye(200)
expected = special.gammaln(np.abs(np.linalg.inv(matrix)) + 1).sum()
before = of_files()
ends = threading.Event()
wrong = []
def use():
    while not ends.is_set():
        if special.gammaln(np.abs(np.linalg.inv(matrix)) + 1).sum() != expected:
            wrong.append(1)
thread = threading.Thread(target=use)
thread.start()
for _ in range(200):
    memory.unmap_unused()
ends.set()
thread.join()
memory.unmap_unused()
print(len(wrong), of_files() < before / 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr
