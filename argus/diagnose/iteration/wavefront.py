"""Who holds up ranks that wait in collectives, from how far each of them had come in each of its process groups.

A collective completes on no rank before all ranks of its group have called it and their GPUs have come to it. So the
first call of a group that has not completed shows which ranks the others wait for:

* a rank that did not call it is *late*, one that was not recorded *absent*;
* where at least half of the ranks completed it, those that did not are *stalled*: their peers had all that they needed
  of them, so it is their own GPU (or the thread that watches it) that stopped. (Calls of fewer ranks may have ended
  because they were aborted before the dump.)
* where all called it and some started it, those that did not start it are held up by something earlier;
* calls of one number that are not the same call on all ranks never complete: those that *differ* are named.

Who is waited for may wait in another group. Ranks and calls are the nodes of a graph whose arrows lead to what they
wait for; its ends are the ranks at fault. Ranks that wait for one another have no end: then a rank is named that made
two calls in another order than most, or that is missed in a collective and waits only for transfers (they are begun
ahead), or only in calls that everybody made, or with far fewer ranks than miss it; else those whose orders differ; else
all of the circle. A call that all its ranks made, and that none of them is
held up before, is the end itself: one of its ranks' GPUs or the network between them, narrowed to ranks whose GPU
completed nothing that they called later.

Whom a transfer waits for may not be known, where the ranks of its group are not listed. Its rank waits all the same:
of ranks that are late those are not at fault, unless nobody else is.
"""

from __future__ import annotations

import itertools
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

ROOTED = frozenset({"Broadcast", "Reduce", "Gather", "Scatter", "Coalesced", "Send", "Recv"})
"""Calls that one rank may complete before the others have come: what it sends fits into buffers."""
UNEVEN = frozenset({"AlltoAll", "Gather", "Scatter", "Coalesced", "Broadcast", "Reduce"})
"""Calls whose sizes may differ from rank to rank (a gather of uneven parts is recorded as broadcasts of different
sizes)."""
STALE_CALLS = 16
"""If others completed so many more calls than a rank has made, its dump is of an earlier moment. Rooted calls do not
count where they are known (a dump may leave out what completed): they may complete without it."""
EARLIER_NS = 5_000_000
"""Of ranks that wait for one another the one that made its last call so much before all others stopped first: more than
clocks of hosts with NTP differ by."""
MAJORITY = 3
"""A rank that is missed by so many times as many ranks as wait with it, in a circle, is the cause."""
FEW = 2
"""Of a call that all its ranks made, so many are named together."""

Ranks = tuple[int, ...]
CallNode = tuple[int, int, int, int]
"""A call: group, number, and for a transfer who receives and who sends; -1 for a collective."""
Node = int | CallNode
"""A rank, or a call."""


@dataclass(frozen=True)
class Group:
    """A process group. ``members``: global ranks."""

    id: int
    name: str
    members: Ranks


@dataclass(frozen=True)
class Call:
    """A call that had not completed.

    Attributes:
        rank, group: Who made it, and where.
        record: Its number among the calls of the rank, in the order of the CPU.
        seq: Its number in the group; of a transfer not used.
        op: As in the table ``collectives``.
        peer: Global rank that it sends to or receives from; -1: a collective.
        started: The GPU had come to it.
        timed_out: The watchdog gave it up.
        dtype, sizes: What it was called with.
    """

    rank: int
    group: int
    record: int
    seq: int
    op: str
    peer: int = -1
    started: bool = False
    timed_out: bool = False
    dtype: str = ""
    sizes: tuple[str, str] = ("", "")


@dataclass
class Snapshot:
    """How far all ranks had come at one moment.

    Attributes:
        groups: By id.
        ranks: Those that were recorded.
        pending: Calls that had not completed.
        issued: Number of the last collective that a rank made in a group; not there: not known.
        done: Number of the last collective that it completed in it, all before it completed, too.
        same: Completed calls that have the number of a pending one.
        rooted: Numbers of the completed calls of a group that are of a kind in :data:`ROOTED`.
        went_past: The last record that a rank's GPU completed; -1 or not there: none is known.
        last_ns: When a rank made its last call.
        absent: Ranks without a record of theirs, such as those that are dead.
        unpaired: Ranks with a pending send or receive whose other end is not known.
        silent: Those of them that NCCL's RAS reports not to answer, in words; ``dead``: that it considers dead.
    """

    groups: dict[int, Group] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    pending: list[Call] = field(default_factory=list)
    issued: dict[tuple[int, int], int] = field(default_factory=dict)
    done: dict[tuple[int, int], int] = field(default_factory=dict)
    same: list[Call] = field(default_factory=list)
    rooted: dict[int, set[int]] = field(default_factory=dict)
    went_past: dict[int, int] = field(default_factory=dict)
    last_ns: dict[int, int] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    unpaired: set[int] = field(default_factory=set)
    silent: dict[int, str] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Wait:
    """A call in which ranks wait.

    Attributes:
        group, seq, op: Which; ``seq`` is -1 of a transfer.
        came: Who waits in it.
        late, absent: Who did not call it, and who is not recorded.
        held: Who called it, and whose GPU had not come to it.
        differ: Who called something else, and what, by rank.
        usual: What most called instead; empty: there is no most.
        first_of: For how many of those who came it is the first call that they wait in.
    """

    group: int
    seq: int
    op: str
    came: Ranks
    late: Ranks = ()
    absent: Ranks = ()
    held: Ranks = ()
    differ: Mapping[int, str] = field(default_factory=dict)
    usual: str = ""
    first_of: int = 0


@dataclass(frozen=True)
class Crossed:
    """Two collectives, by group and number, that a rank called in another order than most.

    Attributes:
        first, then: In its own order.
        both: All ranks that are compared made both; otherwise some, this one or others, made only their first.
    """

    first: tuple[int, int]
    then: tuple[int, int]
    both: bool


Reason = Literal["late", "absent", "stalled", "differs", "held"]


@dataclass
class Wavefront:
    """What a snapshot shows.

    Attributes:
        at_fault: Why, by rank.
        candidates: Ranks of which one or several are at fault.
        circle: They wait for one another.
        crossed: What a rank called in another order than most, where that is its fault.
        waits: The first call of each group that did not complete, those with the most waiting ranks first.
        lagging: Of a stalled rank, a group with the last call that it completed, and that its peers did.
        stale: Ranks whose record is of an earlier moment.
        unpaired: Late ranks that are not at fault, since they wait in a transfer for somebody who is not known.
        stuck: Calls that all their ranks made and that nothing holds up.
    """

    at_fault: dict[int, Reason] = field(default_factory=dict)
    candidates: Ranks = ()
    circle: bool = False
    crossed: dict[int, Crossed] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    lagging: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    stale: Ranks = ()
    unpaired: Ranks = ()
    stuck: list[Wait] = field(default_factory=list)
    timed_out: bool = False


def find(snapshot: Snapshot) -> Wavefront:
    """Who holds up whom in a snapshot. Nobody waits if neither ``waits`` nor ``at_fault`` has anything."""
    return _Search(snapshot).run()


class _Search:
    """One snapshot being searched."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.seen = snapshot
        self.found = Wavefront()
        self.by_call: dict[tuple[int, int], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
        self.same: dict[tuple[int, int], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
        self.transfers: dict[tuple[int, int, int], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
        self.first: dict[int, tuple[int, Node]] = {}
        """The earliest call that a rank waits in: record, and which."""
        self.edges: dict[Node, set[Node]] = defaultdict(set)
        self.records: dict[tuple[int, Node], int] = {}
        self.nodes: dict[Node, Wait] = {}

    def run(self) -> Wavefront:
        result = self.found
        result.stale = self._stale()
        self.recorded = self.seen.ranks - set(result.stale)
        for call in self.seen.pending:
            if call.rank not in self.recorded:
                continue
            result.timed_out |= call.timed_out
            if call.peer < 0:
                self.by_call[call.group, call.seq][call.rank].append(call)
            else:
                sender, receiver = (call.peer, call.rank) if call.op == "Recv" else (call.rank, call.peer)
                self.transfers[call.group, sender, receiver][call.rank].append(call)
        for call in self.seen.same:
            if call.rank in self.recorded:
                self.same[call.group, call.seq][call.rank].append(call)
        numbers: dict[int, list[int]] = defaultdict(list)
        for group, seq in self.by_call:
            numbers[group].append(seq)
        for group, pending in numbers.items():
            self._collectives(group, sorted(pending))
        for (group, sender, receiver), calls in self.transfers.items():
            self._transfer(group, sender, receiver, calls)
        self._behind()
        self._ends()
        result.waits = sorted(self.nodes.values(), key=lambda one: (one.seq < 0, -len(one.came), one.group))
        return result

    def _members(self, group: int) -> Ranks:
        known = self.seen.groups.get(group)
        if known is not None and known.members:
            return known.members
        return tuple(sorted({rank for rank, other in self.seen.issued if other == group}))

    def _stale(self) -> Ranks:
        """Ranks whose record is of an earlier moment than those of others: these completed calls with them that they
        had not made yet."""
        furthest: dict[int, int] = {}
        for (_, group), seq in self.seen.done.items():
            furthest[group] = max(seq, furthest.get(group, -1))
        return tuple(sorted({
            rank for (rank, group), seq in self.seen.issued.items()
            if self._without(group, seq, furthest.get(group, -1)) > STALE_CALLS
        }))  # fmt: skip

    def _without(self, group: int, last: int, furthest: int) -> int:
        """How many of the calls after one, up to another, need all ranks to complete."""
        count = furthest - last
        if count > STALE_CALLS:
            count -= sum(last < seq <= furthest for seq in self.seen.rooted.get(group, ()))
        return count

    def _completed(self, rank: int, group: int, seq: int) -> bool:
        return self.seen.done.get((rank, group), -1) >= seq or rank in self.same.get((group, seq), ())

    def _collectives(self, group: int, pending: Sequence[int]) -> None:
        """The first call of a group that nobody completed, and who did not complete those that others did."""
        members = self._members(group)
        for seq in pending:
            came = self.by_call[group, seq]
            finished = [rank for rank in members if rank not in came and self._completed(rank, group, seq)]
            op = next(iter(came.values()))[0].op
            if len(finished) >= len(came) and op not in ROOTED:
                for rank in came:
                    last = max(self.seen.done.get((other, group), seq) for other in finished)
                    self.found.lagging.setdefault(rank, (group, seq - 1, max(last, seq)))
                    self.found.at_fault[rank] = "stalled"
                continue
            late = [
                rank for rank in members
                if rank not in came and rank not in finished and rank in self.recorded
                and self.seen.issued.get((rank, group), -1) < seq
            ]  # fmt: skip
            absent = [rank for rank in members if rank not in self.recorded]
            if finished and not (late or absent):
                continue
            differ, usual = self._mismatch(group, seq, came)
            op = next((calls[0].op for rank, calls in sorted(came.items()) if rank not in differ), op)
            node: Node = (group, seq, -1, -1)
            self._wait(node, Wait(
                group, seq, op, tuple(sorted(came)), tuple(late), tuple(absent), differ=differ, usual=usual
            ), {rank: calls[0].record for rank, calls in came.items()})  # fmt: skip
            started = {rank for rank, calls in came.items() if calls[0].started}
            if started and len(started) < len(came):
                held = tuple(sorted(rank for rank in came if rank not in started))
                self.nodes[node] = replace(self.nodes[node], held=held)
            for rank in differ:
                self.found.at_fault[rank] = "differs"
            return

    def _wait(self, node: Node, wait: Wait, records: Mapping[int, int]) -> None:
        self.nodes[node] = wait
        for rank, record in records.items():
            self.edges[rank].add(node)
            self.records[rank, node] = record
            if rank not in self.first or record < self.first[rank][0]:
                self.first[rank] = (record, node)
        self.edges[node].update((*wait.late, *wait.absent, *wait.differ))

    def _transfer(self, group: int, sender: int, receiver: int, calls: Mapping[int, list[Call]]) -> None:
        """Sends and receives between two ranks, which match in order: only the first pair matters."""
        first = {rank: min(each, key=lambda call: call.record) for rank, each in calls.items()}
        others = [rank for rank in (sender, receiver) if rank not in first]
        late = tuple(rank for rank in others if rank in self.recorded)
        absent = tuple(rank for rank in others if rank not in self.recorded)
        op = "Recv" if receiver in first else "Send"
        # Both called it, and one GPU came to it: the other one is held up before.
        started = {rank for rank, call in first.items() if call.started}
        held = tuple(sorted(set(first) - started)) if started and len(first) == 2 else ()
        self._wait(
            (group, -1, receiver, sender), Wait(group, -1, op, tuple(sorted(first)), late, absent, held),
            {rank: call.record for rank, call in first.items()},
        )  # fmt: skip

    def _mismatch(self, group: int, seq: int, came: Mapping[int, list[Call]]) -> tuple[dict[int, str], str]:
        """Who called something else than most ranks did, and what; and what most called. Where there is no majority,
        everybody."""
        calls = {**self.same.get((group, seq), {}), **came}
        kinds = {rank: tuple(sorted({call.op for call in each})) for rank, each in calls.items()}
        words = {rank: " and ".join(kind) for rank, kind in kinds.items()}
        if differ := _minority(kinds):
            return _named(words, differ)
        single = {rank: each[0] for rank, each in calls.items() if len(each) == 1 and each[0].op not in UNEVEN}
        types = {rank: (call.dtype,) for rank, call in single.items() if call.dtype not in ("", "unknown")}
        if differ := _minority(types):
            return _named({rank: f"{single[rank].op} of {name}" for rank, (name,) in types.items()}, differ)
        sizes = {rank: call.sizes for rank, call in single.items() if any(call.sizes)}
        if differ := _minority(sizes):
            words = {rank: f"{single[rank].op} of {' to '.join(filter(None, size))}" for rank, size in sizes.items()}
            return _named(words, differ)
        return {}, ""

    def _behind(self) -> None:
        """Ranks that called what others wait in too, but whose GPU is held up before it by an earlier call, or by
        itself."""
        for node, wait in list(self.nodes.items()):
            held = set(wait.held)
            for rank in wait.came:
                record, earliest = self.first[rank]
                if rank in self.found.at_fault or (earliest != node and record < self.records[rank, node]):
                    held.add(rank)
            first_of = sum(self.first[rank][1] == node for rank in wait.came)
            shown = held if held != set(wait.came) else wait.held
            self.nodes[node] = replace(wait, held=tuple(sorted(shown)), first_of=first_of)
            self.edges[node].update(held)
            for rank in held:
                # What holds it up is earlier, or itself.
                self.edges[rank].discard(node)

    def _went_past(self, rank: int, node: Node) -> bool:
        """Whether a rank's GPU completed something that was called after a call that is pending."""
        return self.seen.went_past.get(rank, -1) > self.records[rank, node]

    def _ends(self) -> None:
        """The ranks that the others wait for and that wait for nobody, and calls that wait for nothing."""
        result = self.found
        for rank in result.at_fault:
            self.edges[rank] = set()
        ends = ends_of(self.edges)
        stuck: list[Node] = []
        circles: list[int] = []
        for end in ends:
            ranks = sorted(node for node in end if isinstance(node, int))
            if len(end) == 1 and ranks:
                rank = ranks[0]
                if rank not in result.at_fault and any(rank in self.edges[node] for node in self.nodes):
                    result.at_fault[rank] = self._reason(rank)
            elif len(end) == 1:
                stuck += list(end)
            elif len(crossed := self._crossed(end, ranks)) == 1:
                result.at_fault[crossed[0]] = "differs"
                result.crossed[crossed[0]] = self._pair(end, ranks, crossed[0])
            elif broken := self._break(end, ranks):
                result.at_fault.update({rank: self._reason(rank) for rank in broken})
            elif (first := self._stopped_first(end, ranks)) is not None:
                result.candidates = (*result.candidates, first)
            else:
                circles += self._crossed(end, ranks, even=True) or self._crossed(end, ranks, transfers=True) or ranks
        if circles:
            result.circle, result.candidates = True, tuple(sorted({*circles, *result.candidates}))
        self._spare()
        result.stuck = [self.nodes[node] for node in stuck if node in self.nodes]
        self._narrow(stuck)

    def _spare(self) -> None:
        """Takes late ranks that wait for somebody unknown from those at fault, if a rank that was recorded is left."""
        result = self.found
        waiting = {rank for rank in self.seen.unpaired if result.at_fault.get(rank) == "late"}
        if any(why != "absent" and rank not in waiting for rank, why in result.at_fault.items()):
            result.unpaired = tuple(sorted(waiting))
            result.at_fault = {rank: why for rank, why in result.at_fault.items() if rank not in waiting}

    def _reason(self, rank: int) -> Reason:
        if rank not in self.recorded:
            return "absent"
        return "late" if any(rank in wait.late for wait in self.nodes.values()) else "held"

    def _crossed(
        self, circle: set[Node], ranks: Sequence[int], *, even: bool = False, transfers: bool = False
    ) -> list[int]:
        """Ranks that called two collectives in another order than most of those that are in both groups, or one without
        the other.

        Args:
            circle: Ranks and calls that wait for one another.
            ranks: The ranks of it.
            even: Of two orders that are as frequent, all of these ranks, if there is nothing clearer.
            transfers: A transfer and a collective instead. Either may have been begun ahead, so that shows less.
        """
        clear: set[int] = set()
        equal: set[int] = set()
        for _, ways, rarer in self._orders(circle, ranks, transfers=transfers):
            if rarer:
                clear.update(rank for rank, way in ways.items() if way == rarer)
            else:
                equal.update(ways)
        return sorted(clear or (equal if even or transfers else ()))

    def _orders(
        self, circle: set[Node], ranks: Sequence[int], *, transfers: bool = False
    ) -> Iterator[tuple[tuple[CallNode, CallNode], dict[int, int], int]]:
        """Each two calls of a circle that ranks called in different orders: the calls; the order of each rank, as
        ``_order`` has it; and the rarer order, 0 if both are as frequent. ``transfers`` as in ``_crossed``."""
        for one, other in itertools.combinations(sorted(node for node in circle if isinstance(node, tuple)), 2):
            if (one[1] < 0) + (other[1] < 0) != transfers:
                continue
            ways = {rank: way for rank in ranks if (way := self._order(rank, one, other))}
            counts = Tally(ways.values()).most_common()
            if len(counts) == 2:
                yield (one, other), ways, counts[1][0] if counts[0][1] > counts[1][1] else 0

    def _pair(self, circle: set[Node], ranks: Sequence[int], rank: int) -> Crossed:
        """The two collectives that a rank called in another order than most: of several pairs the one that most ranks
        called, and of these the one that its rank had come to last."""
        found: list[tuple[int, int, Crossed]] = []
        for pair, ways, rarer in self._orders(circle, ranks):
            if not rarer or ways.get(rank) != rarer:
                continue
            first, then = pair if rarer == 1 else pair[::-1]
            both = all((each, node) in self.records for each in ways for node in pair)
            found.append((len(ways), self.records[rank, first], Crossed(first[:2], then[:2], both)))
        return max(found, key=lambda each: each[:2])[2]

    def _order(self, rank: int, one: Node, other: Node) -> int:
        """1 if a rank called the first of two calls first, 2 if the second, also if it called only that; 0: it is not
        known, or not in both."""
        if any(rank not in (*node[2:], *self._members(node[0])) for node in (one, other) if isinstance(node, tuple)):
            return 0
        if any(node[1] < 0 and rank not in node[2:] for node in (one, other) if isinstance(node, tuple)):
            return 0
        records = [self.records.get((rank, node)) for node in (one, other)]
        if rank not in self.recorded or records == [None, None]:
            return 0
        late = [rank in self.nodes[node].late for node in (one, other)]
        if records[0] is None or records[1] is None:
            return (2 if late[0] else 0) if records[0] is None else (1 if late[1] else 0)
        return 1 if records[0] < records[1] else 2

    def _break(self, circle: set[Node], ranks: Sequence[int]) -> list[int]:
        """The ranks that a circle of waiting ranks waits for; empty: they cannot be distinguished."""
        inside = {node: {other for other in self.edges.get(node, ()) if other in circle} for node in circle}
        calls = {node: self.nodes[node] for node in circle if isinstance(node, tuple) and node[1] >= 0}
        missed: dict[int, list[Wait]] = {rank: [] for rank in ranks}
        for call in self.nodes.values():
            for rank in (*call.late, *call.absent) if call.seq >= 0 else ():
                if rank in missed:
                    missed[rank].append(call)
        waits = {rank: [calls[node] for node in inside[rank] if node in calls] for rank in ranks}
        # Transfers are begun ahead of time, collectives hardly ever: who is missed in one and waits only in
        # transfers; who
        # waits only where nobody is missing, since the others cannot come to it on their GPUs before the call that it
        # left out.
        rules: list[Callable[[int], bool]] = [
            lambda rank: not waits[rank],
            lambda rank: not any(call.late or call.absent for call in waits[rank]),
            # Who is missed by far more ranks than wait with it went its own way.
            lambda rank: max(len(c.came) for c in missed[rank]) >= MAJORITY * max(len(c.came) for c in waits[rank]),
        ]
        for rule in rules:
            if left := [rank for rank in ranks if missed[rank] and rule(rank)]:
                return left
        ahead = {
            node: {other for other in targets if not (isinstance(node, int) and self._went_past(node, other))}
            for node, targets in inside.items()
        }
        if ends := [node for end in ends_of(ahead) for node in end if len(end) == 1 and isinstance(node, int)]:
            return sorted(ends)
        return []

    def _stopped_first(self, circle: set[Node], ranks: Sequence[int]) -> int | None:
        """Of ranks that wait for one another in transfers, the one that clearly made its last call first. Collectives
        in different orders are no such case: there none is more the cause than the others."""
        times = sorted((self.seen.last_ns[rank], rank) for rank in ranks if self.seen.last_ns.get(rank, 0) > 0)
        if not any(isinstance(node, tuple) and node[1] < 0 for node in circle) or len(times) < max(2, len(ranks)):
            return None
        return times[0][1] if times[1][0] - times[0][0] >= EARLIER_NS else None

    def _narrow(self, stuck: Sequence[Node]) -> None:
        """Of calls that all their ranks made: whose GPU went past none of them, and who is in several."""
        result = self.found
        tally: Tally[int] = Tally()
        for node in stuck:
            wait = self.nodes[node]
            alive = {rank for rank in wait.came if self._went_past(rank, node)}
            left = [rank for rank in wait.came if rank not in alive]
            if left and len(left) < len(wait.came):
                tally.update(left)
                if len(left) == 1:
                    result.at_fault[left[0]] = "held"
            elif len(wait.came) <= FEW:
                tally.update(wait.came)
        named = set(tally) - set(result.at_fault)
        if named and not result.circle and len(named) <= FEW * max(len(stuck), 1):
            result.candidates = tuple(sorted({*named, *result.candidates}))


def _named(words: Mapping[int, str], differ: Sequence[int]) -> tuple[dict[int, str], str]:
    """What each of these ranks called, and what the others did."""
    usual = next((text for rank, text in words.items() if rank not in differ), "")
    return {rank: words[rank] for rank in differ}, usual


def _minority(values: Mapping[int, tuple[str, ...]]) -> list[int]:
    """Ranks whose value is not that of most; all, if there is no most; none, if all are the same."""
    counts = Tally(values.values()).most_common()
    if len(counts) < 2:
        return []
    if counts[0][1] == counts[1][1]:
        return sorted(values)
    return sorted(rank for rank, value in values.items() if value != counts[0][0])


def ends_of(edges: Mapping[Node, set[Node]]) -> list[set[Node]]:
    """Strongly connected parts of a graph that no arrow leads out of (Tarjan, without recursion). Nodes that no arrow
    leads to or from are none."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    on_path: set[Node] = set()
    part: dict[Node, int] = {}
    parts: list[set[Node]] = []
    touched = {node for node, targets in edges.items() if targets} | {t for targets in edges.values() for t in targets}
    for root in edges:
        if root in order:
            continue
        ahead: list[tuple[Node, list[Node]]] = [(root, list(edges.get(root, ())))]
        order[root] = low[root] = len(order)
        path.append(root)
        on_path.add(root)
        while ahead:
            node, targets = ahead[-1]
            if targets:
                target = targets.pop()
                if target not in order:
                    order[target] = low[target] = len(order)
                    path.append(target)
                    on_path.add(target)
                    ahead.append((target, list(edges.get(target, ()))))
                elif target in on_path:
                    low[node] = min(low[node], order[target])
                continue
            ahead.pop()
            if ahead:
                low[ahead[-1][0]] = min(low[ahead[-1][0]], low[node])
            if low[node] == order[node]:
                component: set[Node] = set()
                while node not in component:
                    last = path.pop()
                    on_path.discard(last)
                    component.add(last)
                    part[last] = len(parts)
                parts.append(component)
    open_ = {part[node] for node, targets in edges.items() for target in targets if part[node] != part[target]}
    return [component for number, component in enumerate(parts) if number not in open_ and component & touched]
