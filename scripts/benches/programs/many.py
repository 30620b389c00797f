"""Starts ranks of one job, by their number: ``many.py RANKS PROGRAM WORDS…``. Prints "ready" once all run. They end
with it (``PR_SET_PDEATHSIG``, which the programs set)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

ranks, program = int(sys.argv[1]), sys.argv[2:]
job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "JOB_NAME": "many"}
for rank in range(ranks):
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    subprocess.Popen([*program, str(rank)], env={**os.environ, **job, **own}, stdin=subprocess.DEVNULL)
print("ready", flush=True)
signal.pause()
