"""Makes rows of a simulated job's steps: what `argus trace` on each of its hosts would have stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus import __version__
from argus.model.environment import bounded, digest
from argus.simulate.engine import CALL_NS, LATENCY_NS, OPTIMIZER_KERNELS, PHASES, Made, Step
from argus.simulate.mesh import Mesh
from argus.simulate.program import BACKWARD_WORK, Program
from argus.tables.arrow import dictionary

Columns = dict[str, Any]
Int = NDArray[np.int64]

DIMENSIONS = ("tp", "ep", "dp", "pp", "world")
COMMUNICATION = ("all_reduce", "all_to_all", "send_recv", "pipeline_bubble")
WALL_ERROR_NS = 50_000_000
"""The error that a host's kernel reports for its clock that NTP keeps (adjtimex: maxerror)."""
LARGE = 1024
"""Of jobs of more ranks only NCCL's kernels among data-parallel and all ranks are stored, and fewer launches, to be
quick."""
NOT_SUMMED = (("kernel", "multi_tensor_adam"), ("kernel", "first"))
SAMPLED_NS = 1e9 / 97
"""Stacks are sampled so often."""
P2P = ("Send", "Recv")
GPU_OPS = ("AllReduce", "AlltoAll", "SendRecv")
OPS = ("AllReduce", "AlltoAll", "Send", "Recv")
NCCL = tuple(
    f"ncclDevKernel_{what}(ncclDevKernelArgsStorage<4096ul>)" for what in ("AllReduce_Sum_bf16_RING_LL", "SendRecv")
)
"""Its kernels; all-to-alls, too, are sends and receives."""
TIMES = ("at", "begin", "end")
ELEMENT_BYTES = 2
WHY = {
    "tp": "all-reduces, few sizes, among neighbours", "ep": "all-to-all", "dp": "all-reduces",
    "pp": "sends and receives, both ways", "world": "nothing larger than 64 KiB, among all ranks",
}  # fmt: skip


class Rows:
    """Columns of tables, without ``job`` and ``run``.

    Args:
        mesh: The ranks.
        program: What they run.
        start_ns: Wall-clock time of the job's time 0.
        offset_ns, drift_ppb: What each host's clock shows too much at time 0, and by how much that grows; shape
            (hosts,).
        hosts: Their names; empty: node0000, node0001 and so on.
    """

    def __init__(
        self, mesh: Mesh, program: Program, start_ns: int, offset_ns: Int | None = None, drift_ppb: Int | None = None,
        hosts: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.mesh, self.program, self.start_ns = mesh, program, start_ns
        zeros = np.zeros(mesh.hosts, np.int64)
        self.offset_ns = zeros if offset_ns is None else offset_ns
        self.drift_ppb = zeros if drift_ppb is None else drift_ppb
        self.hosts = list(hosts) or [f"node{number:04d}" for number in range(mesh.hosts)]
        self._all = np.arange(mesh.size)
        self.few_kernels = mesh.size > LARGE

    def wall(self, ns: NDArray[np.float64], ranks: Int) -> Int:
        """Times of the job as the hosts of these ranks show them."""
        host = self.mesh.host[ranks]
        return self.start_ns + self.offset_ns[host] + np.rint(ns + ns * (self.drift_ppb[host] * 1e-9)).astype(np.int64)

    def _who(self, ranks: Int, *, thread: bool = False) -> Columns:
        pid = 10_000 + ranks % self.mesh.per_host
        here = {"rank": ranks, "host": self.host_column(ranks), "pid": pid}
        return {**here, "tid": pid} if thread else here

    def host_column(self, ranks: Int) -> Any:
        """Each rank's host."""
        return dictionary(self.mesh.host[ranks].astype(np.int32), self.hosts)

    def handle(self, ranks: Int, dimension: str) -> Int:
        """The handle of a communicator in each rank's process."""
        return 0x7F00_0000_0000 + (ranks * len(DIMENSIONS) + DIMENSIONS.index(dimension)) * 0x2000

    # ---- once a job

    def job(self, begin_ns: float, end_ns: float | None, version: int) -> Iterator[tuple[str, Columns]]:
        """Sessions and ranks. ``end_ns``: None while it is being written."""
        mesh, hosts = self.mesh, self.mesh.hosts
        first = np.unique(mesh.host, return_index=True)[1]
        started = self.wall(np.full(hosts, begin_ns), first)
        mono = np.where(self.offset_ns != 0, self.start_ns + self.offset_ns, 0)
        yield "jobs", {
            "host": self.hosts, "started": started,
            "ended": [None] * hosts if end_ns is None else self.wall(np.full(hosts, end_ns), first),
            "world_size": mesh.size, "launcher": "torchrun", "wall_error_ns": WALL_ERROR_NS if hosts > 1 else -1,
            "mono_offset_ns": mono, "argus_version": __version__, "version": version,
        }  # fmt: skip

    def ranks(self, version: int) -> Iterator[tuple[str, Columns]]:
        """Ranks, communicators and what these are for."""
        mesh = self.mesh
        yield "ranks", {
            **self._who(self._all), "local_rank": (self._all % mesh.per_host).astype(np.int32),
            "rank_source": "torchrun", "started": np.full(mesh.size, self.start_ns - 60 * 10**9), "exe": "python3",
            "command": "python3 train.py", "libraries": [["libcuda.so.1", "libnccl.so.2"]] * mesh.size, "probes": 60,
            "state": "traced", "version": version,
        }  # fmt: skip
        yield "features", {
            **{name: self._who(self._all)[name] for name in ("rank", "host")}, "feature": "gpu_times", "state": "on",
            "reason": "", "version": version,
        }  # fmt: skip
        for dimension, members in mesh.groups.items():
            ranks = members.ravel()
            groups, size = members.shape
            number = (DIMENSIONS.index(dimension) + 1) * 1_000_003 + np.arange(groups)
            yield "communicators", {
                "rank": ranks, "comm": self.handle(ranks, dimension), "comm_group": np.repeat(number, size),
                "comm_rank": np.tile(np.arange(size, dtype=np.int32), groups), "nranks": size, "seq_offset": 0,
                "joined_by": "unique_id", "error": "", "version": version,
            }  # fmt: skip
            host = mesh.host[members]
            commands = [
                (self.hosts[one], int(number[group]), members[group][host[group] == one].tolist())
                for group in range(groups)
                for one in np.unique(host[group]).tolist()
            ]
            yield "parallel_groups", {
                "host": [one[0] for one in commands], "comm_group": [one[1] for one in commands],
                "dimension": dimension, "ranks": [one[2] for one in commands], "nranks": size, "confidence": 0.9,
                "why": WHY[dimension], "version": version, "superseded": 0,
            }  # fmt: skip

    def environment(self, facts: Mapping[str, str], version: int) -> Iterator[tuple[str, Columns]]:
        """What every rank ran on and with."""
        kept = bounded(facts)
        yield "environments", {
            **{name: self._who(self._all)[name] for name in ("rank", "host")}, "pid": 0,
            "ts": np.full(self.mesh.size, self.start_ns, np.int64), "facts": [kept] * self.mesh.size,
            "digest": np.full(self.mesh.size, digest(kept), np.uint64), "version": version,
        }  # fmt: skip

    def layout(self, version: int) -> Iterator[tuple[str, Columns]]:
        """How the job is split: a recording may have it, a live trace does not."""
        mesh = self.mesh
        sizes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp, "sp": 1, "vpp": mesh.vpp, "world_size": mesh.size}
        yield "parallel_layout", {**sizes, "source": "simulate", "version": version}

    def coverage(self, at_ns: float, version: int) -> Iterator[tuple[str, Columns]]:
        """What was lost: nothing."""
        first = np.unique(self.mesh.host, return_index=True)[1]
        for counter in ("launches_ring_discarded", "collectives_ring_discarded"):
            yield "coverage", {
                "host": self.hosts, "counter": counter, "value": 0, "loss": True,
                "ts": self.wall(np.full(self.mesh.hosts, at_ns), first), "version": version,
            }  # fmt: skip

    # ---- of steps

    def steps(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        """All rows of consecutive steps."""
        whole = [step for step in steps if not step.spent]
        yield from self._collectives(steps)
        if whole:
            yield from self._iterations(whole)
            yield from self._gpu(whole)
            yield from self._launches(whole)
            yield from self._kernel_events(whole)
            yield from self._gpu_collectives(whole)
            yield from self._pauses(whole)
            yield from self._usage(whole)

    def _spread(self, steps: Sequence[Step]) -> tuple[Int, Int]:
        """(rank, step) of a row for each rank and step, in the order of (steps, ranks)."""
        numbers = np.array([step.number for step in steps])
        return np.tile(self._all, len(steps)), np.repeat(numbers, self.mesh.size)

    def _iterations(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        ranks, numbers = self._spread(steps)
        begin = self.wall(np.concatenate([step.cpu_begin.ravel() for step in steps]), ranks)
        end = self.wall(np.concatenate([step.cpu_end.ravel() for step in steps]), ranks)
        each = np.array([len(calls) for calls in steps[0].calls])[self._stage(ranks)]
        yield "iterations", {
            "rank": ranks, "step": numbers, "host": self._who(ranks)["host"], "ts": begin, "duration_ns": end - begin,
            "collectives": each, "launches": self._kernels(), "method": "collectives", "confidence": 1.0,
        }  # fmt: skip

    def _stage(self, ranks: Int) -> Int:
        return ranks // (self.mesh.dp * self.mesh.tp)

    def _kernels(self) -> int:
        program = self.program
        return int(program.kernels * (1 + BACKWARD_WORK) * program.micro_batches) + OPTIMIZER_KERNELS

    def _gpu(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        ranks, numbers = self._spread(steps)
        begin = self.wall(np.concatenate([step.gpu_begin.ravel() for step in steps]), ranks)
        took = self.wall(np.concatenate([step.gpu_end.ravel() for step in steps]), ranks) - begin
        spent = np.concatenate([step.phases.reshape(len(PHASES) - 1, -1) for step in steps], axis=1).astype(np.int64)
        idle = took - spent.sum(axis=0)
        # Rounded times may lack some ns.
        spent[1] += np.minimum(idle, 0)
        spent = np.concatenate([spent, np.maximum(idle, 0)[None]])
        hidden = {
            name: np.concatenate([step.hidden[name].ravel() for step in steps]).astype(np.int64)
            for name in steps[0].hidden
        }
        by = dict(zip(PHASES, spent, strict=True))
        exposed = sum((by[name] for name in COMMUNICATION), np.zeros_like(took))
        behind = sum(hidden.values(), np.zeros_like(took))
        compute = by["forward"] + by["backward"] + by["optimizer"]
        idle = by["idle"] + by["data_loading"]
        where = {**self._who(ranks), "device": ranks % self.mesh.per_host, "step": numbers, "ts": begin}
        # How far the GPU is behind its CPU at the end of the step; at its begin the CPU has just waited for it.
        behind_cpu = np.concatenate(
            [np.concatenate([(made[-1].begin - made[-1].at).ravel() for made in step.calls]) for step in steps]
        )
        latency = np.maximum(behind_cpu, LATENCY_NS).astype(np.int64)
        yield "gpu_steps", {
            **where, "duration_ns": took, "busy_ns": took - idle, "compute_ns": compute,
            "communication_ns": exposed + behind, "exposed_communication_ns": exposed,
            "overlapped_communication_ns": behind, "memcpy_ns": by["memcpy"], "idle_ns": idle, "idle_gaps": 3,
            "largest_gap_ns": idle // 2, "kernels": self._kernels(), "queue_depth_mean": 500.0, "queue_depth_max": 1024,
            "issue_latency_p50_ns": np.maximum(latency // 2, int(LATENCY_NS)), "issue_latency_p99_ns": latency,
            "void_share": (idle / np.maximum(took, 1)).astype(np.float32),
        }  # fmt: skip
        there = spent > 0
        phase, row = np.nonzero(there)
        operations = np.array([1, 1, 0, 0, 0, 0, 0, 0, 0, 0]) * self.program.kernels + np.array(
            [0, 0, OPTIMIZER_KERNELS, 4, 2, 4, 4, 1, 0, 0]
        )
        overlapped = np.zeros_like(spent)
        for name, values in hidden.items():
            overlapped[PHASES.index(name)] = values
        sure = np.array([0.8, 0.8, 0.8, 0.9, 0.9, 0.9, 0.8, 0.9, 0.8, 0.8], np.float32)
        method = np.array([1, 1, 1, 0, 0, 0, 0, 0, 2, 0], np.int32)
        yield "gpu_phases", {
            **self._who(ranks[row]), "device": ranks[row] % self.mesh.per_host, "step": numbers[row], "ts": begin[row],
            "phase": dictionary(phase.astype(np.int32), list(PHASES)), "duration_ns": spent[there],
            "overlapped_ns": overlapped[there], "operations": operations[phase],
            "method": dictionary(method[phase], ["records", "names", "calls"]), "confidence": sure[phase],
        }  # fmt: skip

    def _made(self, steps: Sequence[Step]) -> Iterator[tuple[Made, Int, Int, list[Made]]]:
        """Of each stage and call: the first step's, the ranks, the numbers on its communicator, and every step's."""
        for stage in range(self.mesh.pp):
            own = self.mesh.ranks[stage].ravel()
            first = steps[0].calls[stage]
            each = Counter((one.call.dimension, one.call.op in P2P) for one in first)
            seen: Counter[tuple[str, bool]] = Counter()
            for place, one in enumerate(first):
                key = one.call.dimension, one.call.op in P2P
                numbers = np.repeat([step.number for step in steps], len(own)) * each[key] + seen[key]
                seen[key] += 1
                yield one, np.tile(own, len(steps)), numbers, [step.calls[stage][place] for step in steps]

    def _collectives(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        parts: dict[str, list[Any]] = {name: [] for name in ("rank", "comm", "op", "seq", "count", "peer", "ns")}
        for one, ranks, numbers, made in self._made(steps):
            ns = np.concatenate([each.at.ravel() for each in made])
            there = np.isfinite(ns)
            for name, values in (
                ("rank", ranks), ("comm", self.handle(ranks, one.call.dimension)),
                ("op", np.full(len(ranks), OPS.index(one.call.op), np.int32)), ("seq", numbers),
                ("count", np.full(len(ranks), one.call.count)), ("peer", np.full(len(ranks), one.call.peer)),
                ("ns", ns),
            ):  # fmt: skip
                parts[name].append(values[there])
        columns = {name: np.concatenate(values) for name, values in parts.items()}
        ranks = columns["rank"]
        yield "collectives", {
            **self._who(ranks, thread=True), **{name: columns[name] for name in ("comm", "seq", "count", "peer")},
            "op": dictionary(columns["op"], list(OPS)), "bytes": columns["count"] * ELEMENT_BYTES, "dtype": "bfloat16",
            "redop": dictionary((columns["op"] == 0).astype(np.int32), ["", "sum"]), "stream": 7,
            "ts": self.wall(columns["ns"], ranks), "duration_ns": int(CALL_NS), "result": 0, "in_group": False,
        }  # fmt: skip

    def _kernel_events(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        """NCCL's kernels, which a trace stores one by one whatever it sums up."""
        parts: dict[str, list[Any]] = {name: [] for name in ("rank", "op", *TIMES)}
        for one, ranks, _, made in self._made(steps):
            if self.few_kernels and one.call.dimension not in ("dp", "world"):
                continue
            for name, values in (
                ("rank", ranks), ("op", np.full(len(ranks), OPS.index(one.call.op), np.int32)),
                *((name, np.concatenate([getattr(each, name).ravel() for each in made])) for name in TIMES),
            ):  # fmt: skip
                parts[name].append(values)
        columns = {name: np.concatenate(values) for name, values in parts.items() if values}
        if not columns:
            return
        ranks, count = columns["rank"], len(columns["rank"])
        begin, called = self.wall(columns["begin"], ranks), self.wall(columns["at"], ranks)
        # A kernel that waited for its stream was launched in the call, and began later.
        begin = np.maximum(begin, called + 1500)
        none = np.zeros(count, np.uint32)
        yield "kernel_events", {
            **self._who(ranks), "device": ranks % self.mesh.per_host, "context": 1, "stream": 20, "kind": "kernel",
            "name": dictionary((columns["op"] > 0).astype(np.int32), list(NCCL)), "ts": begin,
            "duration_ns": np.maximum(self.wall(columns["end"], ranks) - begin, 1000), "launch_ts": called + 1000,
            "issue_latency_ns": begin - called - 1000, "launch_tid": 10_000 + ranks % self.mesh.per_host,
            "launch_probed": False, "correlation": none, "graph": 0, "graph_node": 0,
            "grid": np.full((count, 3), [24, 1, 1], np.uint32), "block": np.full((count, 3), [544, 1, 1], np.uint16),
            "registers": 96, "shared_static": 0, "shared_dynamic": 0, "bytes": 0,
        }  # fmt: skip

    def _gpu_collectives(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        """NCCL's kernels by communicator, operation and peer."""
        numbers = np.array([step.number for step in steps])
        begins = np.stack([step.gpu_begin.reshape(self.mesh.pp, -1) for step in steps])
        parts: dict[str, list[Any]] = {
            name: [] for name in ("rank", "step", "at", "comm", "op", "peer", "calls", "bytes")
        }
        took: list[NDArray[np.float64]] = []
        shortest: list[NDArray[np.float64]] = []
        for stage in range(self.mesh.pp):
            own = self.mesh.ranks[stage].ravel()
            by_kind: dict[tuple[str, str, int], list[int]] = {}
            for place, one in enumerate(steps[0].calls[stage]):
                op = "SendRecv" if one.call.op in P2P else one.call.op
                by_kind.setdefault((one.call.dimension, op, one.call.peer), []).append(place)
            ranks = np.tile(own, len(steps))
            for (dimension, op, peer), places in by_kind.items():
                each = [
                    np.concatenate(
                        [(step.calls[stage][at].end - step.calls[stage][at].begin).ravel() for step in steps]
                    )
                    for at in places
                ]
                took.append(np.sum(each, axis=0))
                shortest.append(np.min(each, axis=0))
                sent = sum(steps[0].calls[stage][at].call.count for at in places) * ELEMENT_BYTES
                for name, values in (
                    ("rank", ranks), ("step", np.repeat(numbers, len(own))), ("at", begins[:, stage].ravel()),
                    ("comm", self.handle(ranks, dimension)),
                    ("op", np.full(len(ranks), GPU_OPS.index(op), np.int32)), ("peer", np.full(len(ranks), peer)),
                    ("calls", np.full(len(ranks), len(places))), ("bytes", np.full(len(ranks), sent)),
                ):  # fmt: skip
                    parts[name].append(values)
        if not took:
            return
        columns = {name: np.concatenate(values) for name, values in parts.items()}
        ranks = columns["rank"]
        yield "gpu_collectives", {
            **self._who(ranks), "device": ranks % self.mesh.per_host, "step": columns["step"],
            "ts": self.wall(columns["at"], ranks), "op": dictionary(columns["op"], list(GPU_OPS)),
            **{name: columns[name] for name in ("comm", "peer", "calls", "bytes")},
            "duration_ns": np.maximum(np.concatenate(took), 1000).astype(np.int64),
            "shortest_ns": np.maximum(np.concatenate(shortest), 1000).astype(np.int64),
        }  # fmt: skip

    def _launches(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        kinds = list(dict.fromkeys(key for step in steps for key in step.launches))
        calls = {
            "sync": "cudaStreamSynchronize", "memcpy_h2d": "cudaMemcpyAsync", "module": "cuModuleLoadData",
            "kernel": "cudaLaunchKernel",
        }  # fmt: skip
        ns, inside, place, ranks = [], [], [], []
        for step in steps:
            for key, (at, took) in step.launches.items():
                if self.few_kernels and key in NOT_SUMMED:
                    continue
                there = slice(None) if key[0] != "module" else took.ravel() > 0
                ns.append(at.ravel()[there])
                inside.append(took.ravel()[there])
                ranks.append(self._all[there])
                place.append(np.full(len(ranks[-1]), kinds.index(key), np.int32))
        rank, which = np.concatenate(ranks), np.concatenate(place)

        def words(each: list[str]) -> Any:
            distinct = list(dict.fromkeys(each))
            return dictionary(np.array([distinct.index(one) for one in each], np.int32)[which], distinct)

        none = np.zeros((len(rank), 0))
        yield "launches", {
            **self._who(rank, thread=True), "call": words([calls[kind] for kind, _ in kinds]),
            "kind": words([kind for kind, _ in kinds]), "kernel": words([name for _, name in kinds]),
            "handle": which, "stream": 7, "bytes": 0, "shared_bytes": 0,
            "grid": none.astype(np.uint32), "block": none.astype(np.uint16),
            "ts": self.wall(np.concatenate(ns), rank),
            "duration_ns": np.rint(np.concatenate(inside)).astype(np.int64), "result": 0, "in_nccl": False,
        }  # fmt: skip

    def _pauses(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        at = np.stack([step.launches["kernel", "first"][0].ravel() - step.pause_ns.ravel() for step in steps])
        took = np.stack([step.pause_ns.ravel() for step in steps])
        step, ranks = np.nonzero(took >= SAMPLED_NS / 2)
        if len(ranks):
            yield "gc_pauses", {
                **self._who(ranks, thread=True), "thread": "MainThread", "ts": self.wall(at[step, ranks], ranks),
                "duration_ns": took[step, ranks].astype(np.int64), "uncertainty_ns": int(SAMPLED_NS), "generation": 2,
                "stack_id": 0,
            }  # fmt: skip

    def _usage(self, steps: Sequence[Step]) -> Iterator[tuple[str, Columns]]:
        """What the kernel accounts of each main thread, every second or step, whichever is longer."""
        often = max(1, round(1e9 / max(float(np.median(steps[0].cpu_end - steps[0].cpu_begin)), 1.0)))
        for place in range(0, len(steps), often):
            some = steps[place : place + often]
            begin, end = some[0].cpu_begin.ravel(), some[-1].cpu_end.ravel()
            queued = np.sum([step.queued_ns.ravel() for step in some], axis=0)
            waited = np.sum([step.launches["sync", ""][1].ravel() for step in some if ("sync", "") in step.launches], 0)
            took = end - begin
            yield "thread_usage", {
                **self._who(self._all, thread=True), "thread": "python3", "ts": self.wall(begin, self._all),
                "interval_ns": took.astype(np.int64),
                "cpu_ns": np.maximum(took - queued - waited, 0).astype(np.int64),
                "runqueue_ns": (queued + 2e-4 * took).astype(np.int64), "io_ns": 0, "voluntary": 4 * len(some),
                "involuntary": (queued / 4e6).astype(np.int64) + 2,
            }  # fmt: skip
