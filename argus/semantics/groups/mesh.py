"""What a job's communicators are for: data, tensor, pipeline, expert or context parallelism, by what is sent in them.

Frameworks name their process groups, but not to NCCL. What they send is characteristic:

* pipeline stages send and receive, activations one way and gradients the other; ring attention sends one way only;
* experts exchange tokens by all-to-all;
* sharded parameters are gathered and their gradients reduce-scattered, in the sizes of the layers;
* tensor parallelism reduces (or gathers and reduce-scatters) activations: many calls of one size, among neighbours;
* data parallelism reduces gradients: a few large calls a step, among all or among ranks that are far apart;
* what is tiny and among all (the norm of the gradients, the loss) is bookkeeping.

Megatron's and DeepSpeed's arguments, where the command line has them, name it outright.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argus.model.units import rank_pattern

DIMENSIONS = ("tp", "cp", "ep", "fsdp", "dp", "pp", "world", "unknown")
"""In the order in which a mesh is written, innermost first."""
WORDS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "fsdp": "sharded data parallel",
    "dp": "data parallel",
    "pp": "pipeline",
    "world": "bookkeeping among all",
    "unknown": "of unknown use",
}
SMALL_BYTES = 65_536
"""Calls of at most this are bookkeeping if nothing larger is sent in a communicator: norms, losses and flags have a few
numbers, and no layer's gradients or activations are so small in the jobs that Argus is for."""
MOSTLY = 0.5
"""An operation is what a communicator is for if it has this share of the bytes."""
MANY = 4.0
"""Tensor parallelism calls for each layer, data parallelism for each bucket of layers: so many times as often at least,
where both are there."""
NEIGHBOURS = 16
"""Largest tensor-parallel group: they stay inside a node, which has 8 or 16 GPUs."""
TWICE = 1.8
"""Sharded parameters are gathered for the forward and again for the backward pass, and scattered once: 2 to 1, a little
less where the last layer is kept. Tensor parallelism with split sequences gathers 6 times for 4 scatters a layer."""
GUESSED = 0.4
"""At most so sure is a group whose members were concluded from equal calls: parallel ones cannot be distinguished."""
MAX_SIZES = 512
"""Different sizes remembered of a communicator. More (variable sequence lengths) add nothing."""
MAX_PEERS, OTHERS = 8, -1
"""Peers remembered of a communicator, each way, and whom the calls to further ones are counted for. What matters is
whether there is more than one."""


@dataclass
class Traffic:
    """What one rank sent in one communicator.

    Attributes:
        calls: By (operation, bytes).
        sent, received: Calls by peer's rank in the communicator, those beyond :data:`MAX_PEERS` under :data:`OTHERS`.
    """

    calls: Tally[tuple[str, int]] = field(default_factory=Tally)
    sent: Tally[int] = field(default_factory=Tally)
    received: Tally[int] = field(default_factory=Tally)

    def add(self, op: str, nbytes: int, peer: int, count: int) -> None:
        """``count`` calls of one kind. ``peer``: of Send and Recv."""
        key = op, nbytes
        if key not in self.calls and len(self.calls) >= MAX_SIZES:
            key = op, 0
        self.calls[key] += count
        if op in ("Send", "Recv"):
            peers = self.sent if op == "Send" else self.received
            peers[peer if peer in peers or len(peers) < MAX_PEERS else OTHERS] += count


@dataclass(frozen=True)
class Group:
    """One communicator of a job.

    Attributes:
        id: ``comm_group`` of the table ``communicators``.
        dimension: One of :data:`DIMENSIONS`.
        ranks: Global ranks that were seen in it, ascending.
        size: Ranks it has; -1: not known.
        confidence: 0 to 1.
        why: What it was inferred from.
        handles: (rank, handle) of each of them.
        concluded: Whether that they belong together was concluded from their calls.
        provisional: Whether ``id`` depends on which of its ranks have called yet: it was made before the trace.
    """

    id: int
    dimension: str
    ranks: tuple[int, ...]
    size: int
    confidence: float
    why: str
    handles: frozenset[tuple[int, int]]
    concluded: bool
    provisional: bool


@dataclass
class _Sum:
    id: int
    ranks: tuple[int, ...]
    size: int
    calls: Tally[tuple[str, int]]
    members: list[Traffic]
    guessed: bool
    """Whether its members were inferred from equal calls, which other communicators of the same ranks make as well."""
    handles: frozenset[tuple[int, int]]
    concluded: bool
    provisional: bool

    def part(self, *ops: str) -> float:
        """Share of the bytes that these operations have."""
        total = sum(nbytes * count for (_, nbytes), count in self.calls.items())
        own = sum(nbytes * count for (op, nbytes), count in self.calls.items() if op in ops)
        return own / total if total else 0.0

    def count(self, wanted: str) -> int:
        """Calls of an operation, beyond bookkeeping's size."""
        return sum(n for (op, nbytes), n in self.calls.items() if op == wanted and nbytes > SMALL_BYTES)

    @property
    def largest(self) -> int:
        return max((nbytes for _, nbytes in self.calls), default=0)

    @cached_property
    def often(self) -> float:
        """Collectives of more than bookkeeping's size, a member."""
        count = sum(n for (op, nbytes), n in self.calls.items() if op not in ("Send", "Recv") and nbytes > SMALL_BYTES)
        return count / max(len(self.members), 1)

    @property
    def neighbours(self) -> bool:
        """Whether its ranks follow one another, and are few enough for a node."""
        return len(self.ranks) <= NEIGHBOURS and self.ranks[-1] - self.ranks[0] == len(self.ranks) - 1


_ARGUMENTS = {
    "tp": r"--tensor-model-parallel-size|--tensor-parallel-size|--tp-size",
    "cp": r"--context-parallel-size|--cp-size",
    "pp": r"--pipeline-model-parallel-size|--pipeline-parallel-size|--pp-size",
    "ep": r"--expert-model-parallel-size|--expert-parallel-size|--ep-size",
}


def sizes_in(command: str) -> dict[str, int]:
    """Sizes of dimensions that a command line gives, as Megatron and its descendants spell them."""
    sizes = {}
    for dimension, names in _ARGUMENTS.items():
        match = re.search(rf"(?:^|\s)(?:{names})[= ](\d+)(?=\s|$)", command)
        if match:
            sizes[dimension] = int(match[1])
    return sizes


def find_mesh(
    communicators: NDArray[np.void],
    traffic: Mapping[tuple[int, int], Traffic],
    *,
    world: int,
    command: str = "",
) -> list[Group]:
    """What each communicator of a job is for.

    Args:
        communicators: :data:`argus.semantics.groups.communicators.COMMUNICATOR` rows.
        traffic: By rank and handle.
        world: Ranks of the job; 0: not known.
        command: Command line of a rank.

    Returns:
        One entry a group that something was sent in, in the order of :data:`DIMENSIONS`, then by ranks.
    """
    sums = _sums(communicators, traffic)
    world = max(world, *(each.ranks[-1] + 1 for each in sums), 1) if sums else world
    sizes = sizes_in(command)
    groups: list[Group] = []
    undecided: list[_Sum] = []
    for each in sums:
        answer = _by_arguments(each, sizes, world) or _by_operations(each, world)
        if answer is None:
            undecided.append(each)
        else:
            groups.append(_group(each, *answer))
    groups += _reductions(undecided, world)
    return sorted(groups, key=lambda group: (DIMENSIONS.index(group.dimension), group.ranks, group.id))


def _sums(communicators: NDArray[np.void], traffic: Mapping[tuple[int, int], Traffic]) -> list[_Sum]:
    columns = (communicators[name].tolist() for name in ("rank", "comm", "comm_group", "nranks", "joined_by"))
    known = {(rank, comm): (group, nranks, how) for rank, comm, group, nranks, how in zip(*columns, strict=True)}
    several = max(Tally(rank for rank, _ in traffic).values(), default=0) > 1
    parts: dict[int, list[tuple[int, int, Traffic]]] = defaultdict(list)
    handles: dict[int, set[tuple[int, int]]] = defaultdict(set)
    concluded: set[int] = set()
    provisional: set[int] = set()
    for (rank, comm), own in sorted(traffic.items()):
        # A handle that could not be joined with others' stands for itself.
        group, nranks, how = known.get((rank, comm), (comm ^ rank << 48, -1, "traffic"))
        parts[group].append((rank, nranks, own))
        handles[group].add((rank, comm))
        if how in ("traffic", "single"):
            concluded.add(group)
        if how in ("traffic", "single", "memory"):
            provisional.add(group)
    sums = []
    for group, members in parts.items():
        calls: Tally[tuple[str, int]] = Tally()
        for _, _, own in members:
            calls.update(own.calls)
        if not calls:
            continue
        ranks = tuple(sorted({rank for rank, _, _ in members}))
        size = max(nranks for _, nranks, _ in members)
        is_concluded = group in concluded
        parts_of = [part for _, _, part in members]
        guessed = several and is_concluded
        of_group = frozenset(handles[group])
        sums.append(_Sum(group, ranks, size, calls, parts_of, guessed, of_group, is_concluded, group in provisional))
    return sums


def _by_arguments(each: _Sum, sizes: dict[str, int], world: int) -> tuple[str, float, str] | None:
    """By the command line, where this group's ranks are those of a dimension that it names."""
    if len(each.ranks) < 2:
        return None
    steps = set(np.diff(each.ranks).tolist())
    strides = {"tp": 1, "cp": sizes.get("tp", 1), "pp": max(world // max(sizes.get("pp", 1), 1), 1)}
    for dimension, stride in strides.items():
        size = sizes.get(dimension, 1)
        if size > 1 and len(each.ranks) == size and steps == {stride}:
            return dimension, 0.95, f"the command line says {dimension} {size}, and these are its ranks"
    return None


def _by_operations(each: _Sum, world: int) -> tuple[str, float, str] | None:
    """By operations that only one dimension uses. None: it is a matter of comparison."""
    if each.size == 1:
        return "unknown", 1.0, "a communicator of one rank"
    sends = sum(count for (op, _), count in each.calls.items() if op in ("Send", "Recv"))
    if each.part("Send", "Recv") >= MOSTLY:
        one_way = all(len(own.sent) <= 1 and len(own.received) <= 1 for own in each.members)
        turns = one_way and all(own.sent.keys() != own.received.keys() for own in each.members if own.sent)
        if turns and len(each.members) > 2:
            return "cp", 0.8, f"{sends:,} sends and receives, all the same way round"
        return "pp", 0.9, f"{sends:,} sends and receives, both ways"
    if each.part("AlltoAll") >= MOSTLY:
        return "ep", 0.9, "all-to-all"
    if each.largest <= SMALL_BYTES and not (each.part("AllGather") and each.part("ReduceScatter")):
        if len(each.ranks) == world or each.size == world:
            return "world", 0.9, f"nothing larger than {each.largest:,} bytes, among all ranks"
        return "unknown", 0.5, f"nothing larger than {each.largest:,} bytes"
    return None


def _reductions(undecided: list[_Sum], world: int) -> list[Group]:
    """Groups that reduce, gather and scatter: tensor parallel, sharded or plain data parallel."""
    # Where nobody calls more rarely by so much there is nothing to compare with.
    most = max((each.often for each in undecided), default=0.0)
    rarest = min((each.often for each in undecided if most > MANY * each.often), default=0.0)
    groups = []
    for each in undecided:
        shards = each.part("AllGather", "ReduceScatter")
        least = SMALL_BYTES if each.largest > SMALL_BYTES else 0
        sizes = {nbytes for (op, nbytes) in each.calls if nbytes > least}
        everybody = len(each.ranks) == world or each.size == world
        # Where others reduce far less often, these do it for each layer.
        within = each.neighbours and not everybody and each.often >= MANY * max(rarest, 1e-9) and rarest > 0
        twice = each.count("AllGather") >= TWICE * max(each.count("ReduceScatter"), 1)
        if within and len(sizes) <= 4 and not (shards >= MOSTLY and twice):
            answer = "tp", 0.85, f"{_times(each, rarest)} as often as among other ranks, in {_few(sizes)}"
        elif shards >= MOSTLY:
            answer = "fsdp", 0.85, f"all-gathers and reduce-scatters, in {_few(sizes)}"
        else:
            sure = 0.85 if rarest and not everybody else 0.7
            answer = "dp", sure, f"all-reduces, in {_few(sizes)}"
        groups.append(_group(each, *answer))
    return groups


def _group(each: _Sum, dimension: str, sure: float, why: str) -> Group:
    if each.guessed:
        sure, why = (
            min(sure, GUESSED),
            f"{why}; who is in it is a guess from equal calls: it was made before Argus came",
        )
    return Group(each.id, dimension, each.ranks, each.size, sure, why, each.handles, each.concluded, each.provisional)


def superseded(before: Sequence[Group], now: Sequence[Group]) -> list[Group]:
    """Provisional groups that are no more, because their handles were found to belong to others."""
    left = {group.id for group in now}
    taken = {handle for group in now for handle in group.handles}
    return [group for group in before if group.id not in left and group.provisional and group.handles & taken]


def _times(each: _Sum, rarest: float) -> str:
    return f"{each.often / rarest:.0f} times"


def _few(sizes: set[int]) -> str:
    return "one size" if len(sizes) == 1 else f"{len(sizes)} sizes"


def describe(groups: list[Group]) -> list[str]:
    """The mesh in lines for people: its dimensions, then each with its groups. A size that is a guess has a question
    mark."""
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(group.dimension, []).append(group)
    lines = []
    sizes = []
    for dimension, members in parts.items():
        rank_sets = sorted({group.ranks for group in members})
        widest = max(max(group.size for group in members), *(len(ranks) for ranks in rank_sets))
        if dimension not in ("world", "unknown"):
            doubt = "?" if all(group.confidence <= GUESSED and group.concluded for group in members) else ""
            sizes.append(f"{dimension} {widest}{doubt}")
        shown = " · ".join(rank_pattern(ranks) for ranks in rank_sets[:4])
        more = f" and {len(rank_sets) - 4} more" if len(rank_sets) > 4 else ""
        lines.append(f"  {dimension:5} {WORDS[dimension]}: ranks {shown}{more} ({members[0].why})")
    return [f"mesh: {' x '.join(sizes)}", *lines] if sizes else lines and ["mesh: none", *lines]
