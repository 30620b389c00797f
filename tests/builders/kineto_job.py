"""Traces of made-up training jobs, as the PyTorch profiler writes them: what slows the job down is known.

A job is simulated operation by operation: each rank's CPU launches, its GPU computes in order, collectives begin where
the last of their ranks has come. Each rank's times are then written on its host's own clock. Nothing of it follows what
Argus expects, only what the profiler of several versions of PyTorch writes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int = NDArray[np.int64]

BASE_NS = 1_735_689_600_000_000_000
MAIN, ENGINE = 4001, 4177
COMPUTE = 7
STREAMS = {"dp": 20, "tp": 24, "pp": 28}
FAULTS = ("healthy", "gpu", "loader", "host", "stall", "link", "regression", "optimizer", "gemm", "pipe",
          "copy")  # fmt: skip
FORMATS = ("1.13", "2.0", "2.3", "2.6")
FORWARD = (
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float, c10::BFloat16 const*)",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
)
BACKWARD = ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_nn", "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<64>("
            "Flash_bwd_params)", "ampere_bf16_s16816gemm_bf16_64x128_ldg8_f2f_nt",
            "void at::native::elementwise_kernel<128, 4, add_grad>(int)")  # fmt: skip
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>(int)"


@dataclass(frozen=True)
class Job:
    """What to make.

    Attributes:
        dp, tp, pp: Sizes; ranks are numbered tensor-parallel first, then data-parallel, then stages.
        fault: One of :data:`FAULTS`, of ``victim``, from step ``onset`` on (counted from 0).
        much: How bad: a factor of a GPU, its matrix products, a link (``pipe``: from the victim's stage to the next)
            or a regression; ms of the rest.
        uneven: Stalls are by up to this share shorter or longer.
        hosts: The ranks are on so many, in order.
        apart_us: Clocks of hosts are off by at most this, and ``drift_ppm``.
        version: One of :data:`FORMATS`.
        names: "rank", "host" (host_pid.time.pt.trace.json), "same" (one host name everywhere) or "number".
        described: NCCL's calls have arguments. ``distributed``: the head names the rank. ``copies``: a batch is copied.
        annotated: ProfilerStep#N is there. ``seq``: numbers of collectives are.
    """

    dp: int = 8
    tp: int = 1
    pp: int = 1
    steps: int = 24
    layers: int = 6
    microbatches: int = 4
    fault: str = "healthy"
    victim: int = 3
    onset: int = 0
    much: float = 1.3
    uneven: float = 0.0
    hosts: int = 1
    apart_us: float = 0.0
    drift_ppm: float = 0.0
    version: str = "2.3"
    names: str = "rank"
    described: bool = True
    distributed: bool = True
    copies: bool = True
    annotated: bool = True
    seq: bool = False
    frames: bool = False
    noise: float = 0.01
    seed: int = 0

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def groups(self, kind: str) -> list[list[int]]:
        """Ranks of each group: "tp", "dp" or "pp" (all stages of a pipeline)."""
        grid = np.arange(self.ranks).reshape(self.pp, self.dp, self.tp)
        axis = {"tp": 2, "dp": 1, "pp": 0}[kind]
        found: list[list[int]] = np.moveaxis(grid, axis, 2).reshape(-1, grid.shape[axis]).tolist()
        return found


class Simulation:
    """A job as it runs, all ranks at once. Times are us since the job began, shape (ranks,)."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = np.random.default_rng(job.seed)
        many = job.ranks
        self.cpu = self.random.uniform(0, 80, many)
        self.free: dict[str, Float] = {name: np.zeros(many) for name in ("compute", *STREAMS)}
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(many)]
        self.step = 0
        self.correlation = np.full(many, 1000)
        self.numbers: dict[tuple[str, int], int] = {}
        self.every = np.arange(many)
        self.names = {kind: job.groups(kind) for kind in STREAMS}

    # ---- what faults do

    def _hit(self, kind: str) -> bool:
        return self.job.fault == kind and self.step >= self.job.onset

    def _took(self, ranks: Int, us: float) -> Float:
        took = us * (1 + self.job.noise * self.random.standard_normal(len(ranks)))
        if self._hit("gpu"):
            took = np.where(ranks == self.job.victim, took * self.job.much, took)
        if self._hit("regression"):
            took = took * self.job.much
        return np.maximum(took, 1.0)

    # ---- what ranks do

    def emit(self, rank: int, category: str, name: str, begin: float, took: float, tid: int, **args: Any) -> None:
        pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 5000 + rank
        self.events[rank].append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": took, "args": args}
        )

    def annotate(self, ranks: Iterable[int], name: str, begin: Float, end: Float, tid: int = MAIN) -> None:
        for rank in ranks:
            self.emit(rank, "user_annotation", name, float(begin[rank]), float(end[rank] - begin[rank]), tid)

    def launch(self, ranks: Int, name: str, us: float, tid: int = MAIN, operator: str = "aten::mm") -> None:
        """Launches a kernel that computes."""
        gap = 6 + 3 * self.random.random(len(ranks))
        if self._hit("host"):
            gap = np.where(ranks == self.job.victim, gap + self.job.much * 1000 / (7 * self.job.layers + 3), gap)
        self.cpu[ranks] += gap
        took = self._took(ranks, us)
        if self._hit("gemm") and "gemm" in name:
            took = np.where(ranks == self.job.victim, took * self.job.much, took)
        for place, rank in enumerate(ranks.tolist()):
            at = float(self.cpu[rank])
            start = max(at + 7.0, float(self.free["compute"][rank]) + 1.0)
            self._pair(rank, "cudaLaunchKernel", name, at, 4.5, start, float(took[place]), COMPUTE, tid)
            self.emit(rank, "cpu_op", operator, at - 2, 8.0, tid, **{"External id": int(self.correlation[rank])})
            if self.job.frames:
                self.emit(
                    rank, "python_function", f"torch/nn/modules/linear.py(116): forward_{place}", at - 3, 9.0, tid
                )
            self.free["compute"][rank] = start + took[place]
        self.cpu[ranks] += 5.0

    def _pair(
        self, rank: int, call: str, name: str, at: float, inside: float, start: float, took: float, stream: int,
        tid: int, category: str = "kernel", **more: Any
    ) -> None:  # fmt: skip
        self.correlation[rank] += 1
        number = int(self.correlation[rank])
        self.emit(rank, "cuda_runtime", call, at, inside, tid, correlation=number, cbid=211)
        device = rank % max(1, self.job.ranks // self.job.hosts)
        arguments: dict[str, Any] = {"device": device, "context": 1, "stream": stream, "correlation": number}
        if category == "kernel":
            arguments |= {"grid": [64, 2, 1], "block": [128, 1, 1], "registers per thread": 64, "shared memory": 0}
        else:
            arguments |= {"bytes": 1 << 20, "memory bandwidth (GB/s)": 20.0}
        self.emit(rank, category, name, start, took, stream, **(arguments | more))

    def collective(
        self, kind: str, op: str, elements: int, us: float, tid: int, members: Sequence[int] | None = None,
        *, blocks: bool = False
    ) -> None:  # fmt: skip
        """All groups of a kind at once, or those with these members."""
        for place, group in enumerate(self.names[kind]):
            ranks = np.array(group)
            if len(ranks) < 2 or (members is not None and not set(group) <= set(members)):
                continue
            self.cpu[ranks] += 12.0
            at = self.cpu[ranks].copy()
            ready = np.maximum(np.maximum(at + 8, self.free[kind][ranks]), self.free["compute"][ranks]) + 2
            lasts = us * (1 + 0.03 * self.random.random())
            if self._hit("link") and kind == "dp" and self.job.victim in group:
                lasts *= self.job.much
            end = ready.max() + lasts + 3 * self.random.random(len(ranks))
            number = self.numbers.get((kind, place), 7)
            self.numbers[kind, place] = number + 1
            described = self._described(kind, place, group, op, elements, number)
            for i, rank in enumerate(group):
                self._comms(rank, kind, op, elements, described, float(at[i]), float(ready[i]), float(end[i]), tid)
            self.free[kind][ranks] = end
            if blocks:
                self.free["compute"][ranks] = end
            self.cpu[ranks] += 10.0

    def _comms(
        self, rank: int, kind: str, op: str, elements: int, described: dict[str, Any], at: float, ready: float,
        end: float, tid: int
    ) -> None:  # fmt: skip
        new = self.job.version in ("2.3", "2.6")
        spelt = {"allreduce": "AllReduce", "allgather": "AllGather", "reduce_scatter": "ReduceScatter"}[op]
        if self.job.version == "2.6":
            kernel = f"ncclDevKernel_{spelt}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        elif new:
            kernel = f"ncclDevKernel_{spelt}_RING_LL_Sum_bf16(ncclDevComm*, unsigned long, ncclWork*)"
        else:
            kernel = f"ncclKernel_{spelt}_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
        around = dict(described)
        if not new:
            around = {"Input Dims": [[elements]], "Input type": ["float"]}
        self.emit(rank, "cpu_op", "record_param_comms", at - 8, 24.0, tid, **around)
        self.emit(rank, "user_annotation", f"nccl:{op.replace('allr', 'all_r').replace('allg', 'all_g')}",
                  at - 6, 20.0, tid)  # fmt: skip
        self._pair(rank, "cudaLaunchKernelExC" if new else "cudaLaunchKernel", kernel, at, 6.0, ready, end - ready,
                   STREAMS[kind], tid, **(described if new else {}))  # fmt: skip

    def _described(
        self, kind: str, place: int, group: list[int], op: str, elements: int, number: int
    ) -> dict[str, Any]:
        if not self.job.described or self.job.version not in ("2.3", "2.6"):
            return {}
        names = {"dp": "0" if self.job.tp == self.job.pp == 1 else str(10 + place), "tp": str(40 + place)}
        described: dict[str, Any] = {
            "Collective name": {"allgather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}.get(op, op),
            "In msg nelems": elements, "Out msg nelems": elements, "Group size": len(group), "dtype": "BFloat16",
            "In split size": "[]", "Out split size": "[]",
            "Process Group Name": names.get(kind, "90"), "Process Group Description": "default_pg",
            "Process Group Ranks": str(group),
        }  # fmt: skip
        if self.job.seq:
            described["Seq"] = number
        return described

    def send(self, sender: int, receiver: int, us: float) -> None:
        """A pipeline's transfer: both sides' kernels end together, and the receiver computes after it."""
        both = np.array([sender, receiver])
        self.cpu[both] += 15.0
        ready = np.maximum(np.maximum(self.cpu[both] + 8, self.free["pp"][both]), self.free["compute"][both]) + 2
        slow = self._hit("pipe") and self.job.victim == min(sender, receiver)
        end = ready.max() + us * (1 + 0.03 * self.random.random()) * (self.job.much if slow else 1.0)
        kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        group = next(group for group in self.names["pp"] if sender in group)
        for i, rank in enumerate(both.tolist()):
            described: dict[str, Any] = {}
            if self.job.described and self.job.version in ("2.3", "2.6"):
                described = {"Collective name": ("send", "recv")[i], "In msg nelems": 4096 * 512,
                        "Group size": len(group),
                        "dtype": "BFloat16", "Process Group Name": f"9{group[0]}",
                        "Process Group Ranks": str(group)}  # fmt: skip
                described["Dst Rank" if i == 0 else "Src Rank"] = receiver if i == 0 else sender
            self.emit(rank, "cpu_op", "record_param_comms", float(self.cpu[rank]) - 8, 24.0, MAIN, **described)
            self._pair(rank, "cudaLaunchKernelExC", kernel, float(self.cpu[rank]), 6.0, float(ready[i]),
                       float(end - ready[i]), STREAMS["pp"], MAIN, **described)  # fmt: skip
        self.free["pp"][both] = end
        self.free["compute"][receiver] = max(float(self.free["compute"][receiver]), float(end))

    # ---- a step

    def forward(self, ranks: Int) -> None:
        begin = self.cpu.copy()
        for layer in range(self.job.layers // self.job.pp):
            for name, us in zip(FORWARD, (420.0, 90.0, 260.0), strict=True):
                self.launch(ranks, name, us)
            if self._hit("stall") and self.job.victim in ranks and layer == 1:
                stall = self.job.much * 1000
                self.cpu[self.job.victim] += stall * (1 + self.job.uneven * (-1) ** self.step if self.job.uneven else 1)
            if self.job.tp > 1:
                self.collective("tp", "allreduce", 1 << 20, 60.0, MAIN, ranks.tolist(), blocks=True)
        if self.job.pp == 1 and self.job.tp == 1 and self.job.version != "1.13":
            self.annotate(ranks.tolist(), "DistributedDataParallel.forward", begin, self.cpu)

    def backward(self, ranks: Int, *, reduce: bool) -> None:
        layers = self.job.layers // self.job.pp
        for layer in range(layers):
            begin = self.cpu.copy()
            for name, us in zip(BACKWARD, (420.0, 520.0, 430.0, 60.0), strict=True):
                self.launch(ranks, name, us, ENGINE, "aten::mm")
            for rank in ranks.tolist():
                self.emit(rank, "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", float(begin[rank]),
                          float(self.cpu[rank] - begin[rank]), ENGINE)  # fmt: skip
            if self.job.tp > 1:
                self.collective("tp", "allreduce", 1 << 20, 60.0, ENGINE, ranks.tolist(), blocks=True)
            if reduce and self.job.dp > 1 and (layer % 2 or layer == layers - 1):
                self.collective("dp", "allreduce", 6_553_600 - layer * 4096, 700.0, ENGINE, ranks.tolist())

    def train(self) -> None:
        """One step of all ranks."""
        job, every = self.job, self.every
        begun = self.cpu.copy()
        took = 900 * (1 + 0.1 * self.random.random(job.ranks))
        if self._hit("loader"):
            took[job.victim] += job.much * 1000
        self.annotate(every.tolist(), "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", self.cpu + 5,
                      self.cpu + 5 + took)  # fmt: skip
        self.cpu += took + 30
        for rank in every.tolist():
            if job.copies:
                start = max(float(self.cpu[rank]) + 6, float(self.free["compute"][rank]))
                us = 45.0 + (job.much * 1000 if self._hit("copy") and rank == job.victim else 0.0)
                self._pair(rank, "cudaMemcpyAsync", "Memcpy HtoD (Pinned -> Device)", float(self.cpu[rank]), 9.0, start,
                           us, COMPUTE, MAIN, "gpu_memcpy")  # fmt: skip
                self.free["compute"][rank] = start + us
        self.cpu += 20
        self.annotate(every.tolist(), "Optimizer.zero_grad#AdamW.zero_grad", self.cpu, self.cpu + 40)
        self.cpu += 50
        if job.pp == 1:
            self.forward(every)
            self.backward(every, reduce=True)
        else:
            self._pipeline()
        begin = self.cpu.copy() + 5
        self.cpu += 10
        for kind in STREAMS:
            self.free["compute"] = np.maximum(self.free["compute"], self.free[kind])
        if self._hit("optimizer"):
            self.cpu[job.victim] += job.much * 1000
        for _ in range(3):
            self.launch(every, ADAM, 150.0, operator="aten::_foreach_add_")
        self.annotate(every.tolist(), "Optimizer.step#AdamW.step", begin, self.cpu)
        self._wait()
        if job.annotated:
            self.annotate(every.tolist(), f"ProfilerStep#{self.step + 11}", begun, self.cpu)
        self.cpu += 15 + 5 * self.random.random(job.ranks)
        self.step += 1

    def _wait(self) -> None:
        """``loss.item()``: copies a number, and waits for it."""
        self.cpu += 10
        for rank in self.every.tolist():
            at = float(self.cpu[rank])
            done = max(float(self.free["compute"][rank]), at + 8) + 2
            self._pair(rank, "cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", at, 6.0, done, 2.0, COMPUTE, MAIN,
                       "gpu_memcpy")  # fmt: skip
            self.correlation[rank] += 1
            self.emit(rank, "cuda_runtime", "cudaStreamSynchronize", at + 7, max(done + 5 - at - 7, 1.0), MAIN,
                      correlation=int(self.correlation[rank]))  # fmt: skip
            self.cpu[rank] = max(done + 6, at + 9)

    def _pipeline(self) -> None:
        """All forwards, then all backwards (GPipe)."""
        job = self.job
        grid = np.arange(job.ranks).reshape(job.pp, -1)
        for _ in range(job.microbatches):
            for stage in range(job.pp):
                self.forward(grid[stage])
                if stage + 1 < job.pp:
                    for a, b in zip(grid[stage].tolist(), grid[stage + 1].tolist(), strict=True):
                        self.send(a, b, 80.0)
        for batch in range(job.microbatches):
            for stage in reversed(range(job.pp)):
                self.backward(grid[stage], reduce=batch == job.microbatches - 1)
                if stage:
                    for a, b in zip(grid[stage].tolist(), grid[stage - 1].tolist(), strict=True):
                        self.send(a, b, 80.0)


def host_of(job: Job, rank: int) -> int:
    return rank * job.hosts // job.ranks


def step_times(job: Job) -> Float:
    """What each step of the job takes, us, shape (steps,)."""
    simulation = Simulation(job)
    ends = [float(simulation.cpu.max())]
    for _ in range(job.steps):
        simulation.train()
        ends.append(float(simulation.cpu.max()))
    return np.diff(ends)


def make(job: Job, folder: Path) -> list[Path]:
    """Runs a job and writes its traces. Returns the files, by rank."""
    simulation = Simulation(job)
    for _ in range(job.steps):
        simulation.train()
    random = np.random.default_rng(job.seed + 99)
    offset = random.uniform(-job.apart_us, job.apart_us, job.hosts)
    if job.hosts > 1 and job.apart_us:
        offset[0], offset[-1] = job.apart_us / 2, -job.apart_us / 2
    drift = random.uniform(-job.drift_ppm, job.drift_ppm, job.hosts) * 1e-6
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _write(job, folder, rank, events, float(offset[host_of(job, rank)]), float(drift[host_of(job, rank)]))
        for rank, events in enumerate(simulation.events)
    ]


def _write(job: Job, folder: Path, rank: int, events: list[dict[str, Any]], offset: float, drift: float) -> Path:
    old = job.version in ("1.13", "2.0")
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": i, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}
                             for i in range(8)],
    }  # fmt: skip
    if job.distributed:
        head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": job.ranks}
    if not old:
        head["displayTimeUnit"], head["baseTimeNanoseconds"] = "ms", BASE_NS
    lines = [
        json.dumps({"ph": "M", "name": "process_name", "pid": 5000 + rank, "tid": 0, "ts": 0,
                    "args": {"name": "python3"}})
    ]  # fmt: skip
    first = BASE_NS // 1000 if old else 1_000_000
    for event in sorted(events, key=lambda one: one["ts"]):
        begin, end = (when + offset + drift * when for when in (event["ts"], event["ts"] + event["dur"]))
        shown = {key: value for key, value in event.items() if key not in ("ts", "dur")}
        text = json.dumps(shown)
        if old:
            low, high = first + int(begin), first + int(end)
            times = f'"ts": {low}, "dur": {high - low}'
        else:
            times = f'"ts": {first + int(begin)}.{int(begin * 1000) % 1000:03d}, "dur": {end - begin:.3f}'
        lines.append(f"{text[:-1]}, {times}}}")
    text = json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(lines) + "\n]}"
    host = {"host": f"node-{host_of(job, rank)}", "same": "worker"}.get(job.names, "")
    if host:
        path = folder / f"{host}_{5000 + rank}.{1_735_689_600_123 + rank}.pt.trace.json"
    else:
        path = folder / (f"rank{rank}.json.gz" if job.names == "rank" else f"trace_{rank}.json")
    path.write_bytes(gzip.compress(text.encode(), 1) if path.suffix == ".gz" else text.encode())
    return path


KINDS = {
    "gpu": ("compute_straggler", "masked_compute_straggler"),
    "gemm": ("compute_straggler", "masked_compute_straggler"), "loader": ("data_loading",),
    "host": ("kernel_issue_stall", "host_contention", "gc_pause"),
    "stall": ("kernel_issue_stall", "host_contention", "gc_pause"), "link": ("link_degradation",),
    "pipe": ("link_degradation",), "copy": ("link_degradation",),
    "regression": ("regression",), "optimizer": ("kernel_issue_stall", "host_contention", "gc_pause"),
}  # fmt: skip
"""What a verdict may call each fault."""


def right(job: Job, verdict: dict[str, Any]) -> str:
    """Why a verdict is wrong; empty: it is right."""
    found = verdict["findings"]
    output = ", ".join(f"{one['kind']} {one['ranks']} {one['confidence']:.0%}" for one in found) or verdict["status"]
    if job.fault == "healthy":
        return "" if verdict["status"] == "healthy" else f"{output}: {verdict['reason'][:160]}"
    if verdict["status"] != "degraded" or not found:
        return f"{output}: {verdict['reason'][:160]}"
    first = found[0]
    ranks: set[int] = set() if job.fault == "regression" else {job.victim}
    if job.fault == "pipe":
        ranks |= {job.victim + job.dp * job.tp}
    if job.fault == "link":
        ranks = set(next(group for group in job.groups("dp") if job.victim in group))
    if first["kind"] not in KINDS[job.fault] or (set(first["ranks"]) != ranks):
        return output
    others = [one for one in found[1:] if set(one["ranks"]) - ranks]
    return f"besides: {output}" if others else ""
