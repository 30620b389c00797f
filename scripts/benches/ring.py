"""Draining kernel-side events: Argus's columnar ring reader against bcc's per-event callback.

One BPF program, run by uprobes on this very process, fills two equal rings with the same records (``struct
argus_launch``). One is drained by ``argus.capture.kernel.ring.Ring``, the other by bcc's ``ring_buffer_consume`` with
the cheapest possible callback (it counts). Both sides must see every record. The ratio is of drain rates, median of
rounds.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time

from argus.capture.kernel import bcc
from argus.capture.kernel.ring import Ring
from argus.live.preflight import own_library
from argus.model import records
from argus.system.resources import resource_dir
from benches import Result

RING_BYTES = 16 << 20
PER_HIT = 500
HITS = 360  # 180,000 records: the ring nearly full

PROGRAM = """
#include <uapi/linux/ptrace.h>
#include "argus.h"
BPF_RINGBUF_OUTPUT(ours, PAGES);
BPF_RINGBUF_OUTPUT(theirs, PAGES);
int fill(struct pt_regs *ctx)
{
    struct argus_launch record = {};
    record.pid = bpf_get_current_pid_tgid() >> 32;
    record.duration_ns = -1;
    for (int i = 0; i < PER_HIT; i++) {
        record.ts_ns = bpf_ktime_get_ns();
        record.handle = i;
        ours.ringbuf_output(&record, sizeof(record), 1);
        theirs.ringbuf_output(&record, sizeof(record), 1);
    }
    return 0;
}
"""


def run(rounds: int) -> Result:
    module = bcc.load()
    flags = [f"-I{resource_dir('bpf')}", "-D__BPF__", f"-DPAGES={RING_BYTES // 4096}", f"-DPER_HIT={PER_HIT}"]
    bpf = module.BPF(text=PROGRAM, cflags=flags)
    library, libc = own_library("getppid")
    program = bpf.load_func("fill", module.BPF.KPROBE)
    (offset,) = library.offsets.values()
    probe = module.lib.bpf_attach_uprobe(program.fd, 0, b"argus_bench", library.path.encode(), offset, os.getpid(), 0)
    ring = Ring(bpf["ours"].map_fd, RING_BYTES, records.LAUNCH)
    seen = 0

    def count(_context: object, _data: object, _size: int) -> None:
        nonlocal seen
        seen += 1

    bpf["theirs"].open_ring_buffer(count)
    expected = PER_HIT * HITS
    rates: dict[str, list[float]] = {"Argus, columns": [], "bcc, callback": []}
    try:
        for turn in range(rounds + 1):
            for _ in range(HITS):
                libc.getppid()
            seen = 0
            began = time.perf_counter()
            bpf.ring_buffer_consume()
            theirs = expected / (time.perf_counter() - began) / 1e6
            began = time.perf_counter()
            taken = ring.drain()
            total = int(taken["handle"].sum())  # touches the data, as any use would
            ours = expected / (time.perf_counter() - began) / 1e6
            if len(taken) != expected or seen != expected or total != HITS * PER_HIT * (PER_HIT - 1) // 2:
                raise SystemExit(f"ring bench: {len(taken)} and {seen} of {expected} records came")
            if turn:  # the first round pays for page faults on both sides
                rates["Argus, columns"].append(ours)
                rates["bcc, callback"].append(theirs)
    finally:
        os.close(probe)
        ring.close()
        bpf.cleanup()
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(rates["Argus, columns"], rates["bcc, callback"], strict=True)
    )
    return Result(
        f"drain of {expected:,} records of {records.LAUNCH.itemsize} bytes",
        "million records/s on one core",
        rates,
        ratio,
        {"record_bytes": ctypes.sizeof(ctypes.c_char * records.LAUNCH.itemsize)},
    )
