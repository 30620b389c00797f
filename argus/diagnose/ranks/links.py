"""Links that became slow, or are slower than others that carry the same: by what transfers take, not by who waits.

A collective takes as long as its last rank's kernel runs: that one waits for nobody. So of a communicator the least
time of any rank is the transfer's, step by step; of two stages that exchange data, the shortest kernel of either. Both
hold where the whole step is no longer for it, since other work hides it. Communicators are compared with others of the
same dimension that send as much, and with their own first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import sql
from argus.diagnose.gpu import (
    FEWEST,
    MIN_STEPS,
    PAST,
    WINDOWS,
    GpuTimes,
    Seen,
    above,
    first_steps,
    grown,
    joined,
    levels,
    low_median,
)
from argus.diagnose.hosts import Hosts
from argus.diagnose.peers import Mesh
from argus.diagnose.phase import find_onset
from argus.diagnose.verdict import Evidence, Finding, listed

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LEAST = 0.2
"""Least excess of a transfer over the others. A link that lost one of its lanes, or a ring one of its network cards,
takes longer by much more; how much the others scatter is asked for on top (argus.diagnose.gpu.SPREADS)."""
LEAST_SHARE = 0.01
"""Less than this share of the step is not told: ranks that come last by turns leave as much in what looks like
transfer."""
ALIKE = 0.05
"""Bytes of a step differ by less than this if as much is sent."""
P2P = "SendRecv"
MOST_ROWS = 120_000
"""Steps of ranks that are read at once: some five rows each, which the store makes fewer."""
TESTS = {
    "AllGather": "all_gather_perf", "ReduceScatter": "reduce_scatter_perf", "Broadcast": "broadcast_perf",
    "Reduce": "reduce_perf", "AlltoAll": "alltoall_perf", P2P: "sendrecv_perf",
}  # fmt: skip
"""Programs of NVIDIA's nccl-tests by operation; of all others ``all_reduce_perf``."""
BLOCK = 10
"""Steps that are looked at to tell whether a transfer was slow before."""


@dataclass(frozen=True)
class Transfers:
    """What transfers took in some steps, by communicator and operation, or by pair of ranks.

    Attributes:
        steps: Shape (steps,).
        names: What each is: (communicator, operation, pair of its ranks), shape (links,).
        members: Global ranks of each.
        alike: The same number for those that should take equally long, shape (links,).
        took: Shape (links, steps), ns; NaN where not known.
        calls: Of a step, shape (links,).
        nbytes: That are sent in a step, shape (links,).
    """

    steps: Int
    names: list[tuple[int, str, tuple[int, int]]]
    members: list[tuple[int, ...]]
    alike: Int
    took: Float
    calls: Float
    nbytes: Float


def transfers_of(
    columns: Mapping[str, NDArray[Any]],
    ranks: Mapping[str, NDArray[Any]],
    steps: Int,
    dimensions: Mapping[int, str],
    mesh: Mesh,
) -> Transfers:
    """Arranges the rows of :data:`argus.diagnose.sql.TRANSFERS`.

    Args:
        columns: Each shape (rows,).
        ranks: As :data:`argus.diagnose.sql.TRANSFER_RANKS` returns them.
        steps: Those to keep, ascending, shape (steps,).
        dimensions: Of each communicator: what it is for.
        mesh: Which ranks are on one stage.
    """
    numbers: dict[tuple[int, str, int, int], int] = {}

    def places(rows: Mapping[str, NDArray[Any]], kept: Any) -> Int:
        """The number of each row's link."""
        coded: list[Any] = []
        back: list[Int] = []
        for column in (rows[name][kept] for name in ("comm_group", "op", "one", "other")):
            if column.dtype == object:
                # Few different words: far quicker than to sort them.
                words = column.tolist()
                values: Any = list(dict.fromkeys(words))
                number_of = {word: number for number, word in enumerate(values)}
                place = np.fromiter(map(number_of.__getitem__, words), np.int64, len(words))
            else:
                values, place = np.unique(column, return_inverse=True)
            coded.append(values)
            back.append(place)
        code = np.zeros(len(back[0]), np.int64)
        for values, place in zip(coded, back, strict=True):
            code = code * max(len(values), 1) + place
        _, first, row = np.unique(code, return_index=True, return_inverse=True)
        found = []
        for at in first.tolist():
            group, op, one, other = (values[place[at]] for values, place in zip(coded, back, strict=True))
            found.append(numbers.setdefault((int(group), str(op), int(one), int(other)), len(numbers)))
        return np.array(found, np.int64)[row] if found else np.empty(0, np.int64)

    # What all ranks tell one another, such as a norm, is too little to tell a link by.
    small = [number for number, dimension in dimensions.items() if dimension == "world"]
    kept = np.isin(columns["step"], steps) & ~np.isin(columns["comm_group"], small)
    link = places(columns, kept)
    of_ranks = places(ranks, ~np.isin(ranks["comm_group"], small))
    least = np.full((len(numbers), len(steps)), np.inf)
    np.minimum.at(least, (link, np.searchsorted(steps, columns["step"][kept])), columns["took_ns"][kept])
    together: list[set[int]] = [set() for _ in numbers]
    large = ranks["ranks"][~np.isin(ranks["comm_group"], small)]
    for place, those in zip(of_ranks.tolist(), large.tolist(), strict=True):
        together[place].update(int(rank) for rank in those)
    members = [tuple(sorted(those)) for those in together]
    # Of one rank alone it is not known how long it waited.
    least[[len(part) < 2 for part in members]] = np.inf
    least[np.isinf(least)] = np.nan
    per_step, size = np.zeros((2, len(numbers)))
    np.maximum.at(per_step, link, columns["calls"][kept])
    np.maximum.at(size, link, columns["bytes"][kept])
    stage = dict(zip(mesh.ranks.tolist(), mesh.stage.tolist(), strict=True))
    classes: dict[Any, int] = {}
    alike = []
    for number, ((group, op, one, _), part) in enumerate(zip(numbers, members, strict=True)):
        volume = round(float(per_step[number]), 1), round(float(np.log(max(size[number], 1.0))), 1)
        stages = tuple(sorted({stage.get(rank, -1) for rank in part}))
        kind: Any = (dimensions.get(group, "unknown"), op, len(part), stages, *volume)
        if one >= 0:
            kind = (P2P, tuple(sorted(stage.get(rank, -1) for rank in part)))
        alike.append(classes.setdefault(kind, len(classes)))
    names = [(group, op, (one, other)) for group, op, one, other in numbers]
    return Transfers(steps, names, members, np.array(alike, np.int64), least, per_step, size)


@dataclass(frozen=True)
class SlowLink:
    """A transfer that takes longer than others, or than before.

    Attributes:
        number: Of the link, among those given.
        factor: How many times as long.
        excess_ns: Time more in a step.
        took_ns: Its time in a step, or of one transfer between two ranks.
        peers: Communicators that it was compared with; 0: with its own past.
    """

    number: int
    factor: float
    excess_ns: float
    took_ns: float
    peers: int


def find_slow_links(now: Transfers, before: Transfers | None = None, *, least: float = LEAST) -> list[SlowLink]:
    """Transfers that take longer than the others of their kind, those that cost most first.

    Args:
        now: Of the newest steps, at least :data:`argus.diagnose.gpu.MIN_STEPS`.
        before: Of the first ones.
        least: Excess that counts, as a share of the transfer.
    """
    if len(now.steps) < MIN_STEPS or not len(now.names):
        return []
    recent = now.took[:, -WINDOWS[0] :]
    excess = np.zeros(len(now.names))
    usual = np.full(len(now.names), np.nan)
    peers = np.zeros(len(now.names), np.int64)
    for label in np.unique(now.alike).tolist():
        links = np.flatnonzero((now.alike == label) & ~np.isnan(recent).all(axis=1))
        if len(links) > 1:
            norm = np.maximum(low_median(recent[links]), 1.0)
            excess[links] = above(recent[links] / norm, least)
            usual[links] = float(np.nanmedian(norm))
            peers[links[excess[links] > 0]] = len(links) - 1
    if before is not None:
        place = {name: number for number, name in enumerate(before.names)}
        # Where more is sent than was, it takes longer.
        both = [
            number
            for number, name in enumerate(now.names)
            if name in place and abs(now.nbytes[number] - before.nbytes[place[name]]) <= ALIKE * now.nbytes[number]
        ]
        was = before.took[[place[now.names[number]] for number in both]]
        # Fewer of the first steps, too: the rest may be slow already.
        for count in sorted({min(count, was.shape[1]) for count in PAST}):
            by_past = grown(recent[both], was[:, :count], least, alone=True)
            for number, took, more in zip(both, was[:, :count], by_past.tolist(), strict=True):
                if more > excess[number] and not peers[number]:
                    excess[number], usual[number] = more, float(np.nanmedian(took))
    level = levels(recent)[0]
    found = []
    for number in np.flatnonzero(excess > 0).tolist():
        times = now.calls[number] if now.names[number][1] == P2P else 1.0
        more, factor = (level[number] - usual[number]) * times, level[number] / usual[number]
        found.append(SlowLink(number, float(factor), float(more), float(level[number]), int(peers[number])))
    return sorted(found, key=lambda link: -link.excess_ns)


def chunks(query: sql.Query, params: Mapping[str, Any], numbers: Int) -> int:
    """Model chunks a stage, at least: 2 where the last stage hands on to the first one (the interleaved schedule of
    Megatron-LM, SC '21), else 1. Two stages hand on to one another in either case.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        numbers: Sure steps, ascending, shape (steps,).
    """
    rows = query(sql.TRANSFER_RANKS, {**params, "first": int(numbers[-3:][0]), "last": int(numbers[-1])})
    pairs: dict[int, set[tuple[int, int]]] = {}
    names = ("comm_group", "op", "one", "other")
    for group, op, one, other in zip(*(rows[name].tolist() for name in names), strict=True):
        if op == P2P:
            pairs.setdefault(int(group), set()).add((int(one), int(other)))
    last = {key: max(other for _, other in those) for key, those in pairs.items()}
    return 2 if any(last[key] > 1 and (0, last[key]) in those for key, those in pairs.items()) else 1


def _newest(numbers: Int, ranks: int) -> Int:
    return numbers[-int(np.clip(MOST_ROWS // max(ranks, 1), FEWEST, WINDOWS[-1])) :]


def _asked(params: Mapping[str, Any], steps: Int) -> list[tuple[str, dict[str, Any]]]:
    """The queries for the transfers of some steps: who takes part, by the last of them, and what they took."""
    last = int(steps[-1])
    return [
        (sql.TRANSFER_RANKS, {**params, "first": int(steps[-3:][0]), "last": last}),
        (sql.TRANSFERS, {**params, "first": int(steps[0]), "last": last}),
    ]


def newest(params: Mapping[str, Any], numbers: Int, ranks: int) -> list[tuple[str, dict[str, Any]]]:
    """The queries that :func:`judge` asks first, of a job of about so many ranks."""
    return _asked(params, _newest(numbers, ranks))


@dataclass(frozen=True)
class Carried:
    """What transfers took.

    Attributes:
        now: In the newest steps.
        dimensions: Of each communicator: what it is for.
        read: The transfers of other steps.
        newest: The steps of ``now``, ascending, shape (steps,).
        window: Parameters of the query that ``now`` comes from.
    """

    now: Transfers
    dimensions: Mapping[int, str]
    read: Callable[[Int], Transfers]
    newest: Int
    window: Mapping[str, Any]


def read(
    seen: Seen, query: sql.Query, params: Mapping[str, Any], numbers: Int, ranks: int, across: Hosts | None
) -> Carried:
    """Reads what transfers took in the newest steps.

    Args:
        seen: What the GPUs of the job did.
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Sure steps, ascending, shape (steps,).
        ranks: How many there are, roughly.
        across: How the hosts go together; None: it is one.
    """
    one = joined(across)
    groups = query(sql.GROUPS, params)
    rows = zip(groups["host"].tolist(), groups["comm_group"].tolist(), groups["dimension"].tolist(), strict=True)
    dimensions = {one.get((str(host), int(group)), int(group)): str(what) for host, group, what in rows}
    newest = _newest(numbers, ranks)

    def read(steps: Int) -> Transfers:
        ranks, rows = (query(text, asked) for text, asked in _asked(params, steps))
        return transfers_of(rows, ranks, steps, dimensions, seen.mesh)

    return Carried(read(newest), dimensions, read, newest, _asked(params, newest)[1][1])


def judge(
    seen: Seen, carried: Carried, numbers: Int, durations: Float, hosts: Mapping[int, str]
) -> tuple[list[Finding], Transfers | None]:
    """What transfers tell of slow links.

    Args:
        seen: What the GPUs of the job did.
        carried: What transfers took, from :func:`read`.
        numbers: Sure steps, ascending, shape (steps,).
        durations: The job's time of each, ns.
        hosts: Node of each rank.

    Returns:
        At most one finding, ``share`` is what a step is longer for it, in ns; and the transfers of the newest steps as
        they would be if those found took what is usual (None: there is no finding).
    """
    now, dimensions, read, newest = carried.now, carried.dimensions, carried.read, carried.newest
    first = first_steps(numbers)[: len(newest)]
    # Their own past is needed by those that have no like.
    alone = len(now.names) > 0 and bool((np.bincount(now.alike) == 1).any())
    before = read(first) if len(first) and alone else None
    slow = find_slow_links(now, before)
    step_ns = float(np.median(durations[-WINDOWS[0] :]))
    if not slow or slow[0].excess_ns < LEAST_SHARE * step_ns:
        return [], None
    worst = slow[0]
    kind = [number for number, name in enumerate(now.names) if name[1] == now.names[worst.number][1]]
    if len(kind) > 2 and 2 * sum(link.number in kind for link in slow) > len(kind):
        return [], None  # nearly all: more is sent, or the network as a whole is slow
    # A rank or a host that all slow transfers have in common is where the link is.
    ranks = set(now.members[worst.number])
    places = {hosts[rank] for rank in ranks if rank in hosts}
    for link in slow[1:]:
        ranks = ranks & set(now.members[link.number]) or ranks
        places = places & {hosts[rank] for rank in now.members[link.number] if rank in hosts} or places
    common = sorted(places if len(slow) > 1 else ())
    onset = _onset(now, before, worst, newest, numbers, read)
    shown = sql.shown(sql.TRANSFERS, carried.window)
    what = dimensions.get(now.names[worst.number][0], "unknown")
    last = int(numbers[-1])
    finding = _finding(now, slow, sorted(ranks), common, what, onset, last, hosts, step_ns, seen.now, shown)
    took = now.took.copy()
    for link in slow:
        if ranks & set(now.members[link.number]):
            took[link.number] /= link.factor
    return [finding], replace(now, took=took)


def _onset(
    now: Transfers,
    before: Transfers | None,
    slow: SlowLink,
    newest: Int,
    numbers: Int,
    read: Callable[[Int], Transfers],
) -> int:
    """The step since which a transfer is slow."""
    name = now.names[slow.number]

    def lead(some: Transfers) -> Float:
        if name not in some.names:
            return np.zeros(len(some.steps))
        number = some.names.index(name)
        others = np.flatnonzero(some.alike == some.alike[number])
        norm = np.full(len(some.steps), slow.took_ns / slow.factor)
        if slow.peers and len(others) > 1:
            norm = np.maximum(low_median(some.took[others]), 1.0)
        return np.asarray(np.nan_to_num(some.took[number] / norm - 1))

    since = find_onset(lead(now), slow.factor - 1)
    if since or len(newest) == len(numbers):
        return int(newest[since])
    low, high = 0, len(numbers) - len(newest)  # slow from `high` on
    if before is not None and np.median(lead(before)) >= (slow.factor - 1) / 2:
        return int(numbers[0])
    while high - low > BLOCK:
        middle = (low + high) // 2
        some = lead(read(numbers[middle : middle + BLOCK]))
        low, high = (low, middle) if np.median(some) >= (slow.factor - 1) / 2 else (middle, high)
    part = numbers[low : high + BLOCK]
    return int(part[find_onset(lead(read(part)), slow.factor - 1)])


def _finding(
    now: Transfers,
    slow: list[SlowLink],
    ranks: list[int],
    common: list[str],
    dimension: str,
    onset: int,
    last: int,
    hosts: Mapping[int, str],
    step_ns: float,
    times: GpuTimes,
    shown: str,
) -> Finding:
    worst = slow[0]
    members, op = now.members[worst.number], now.names[worst.number][1]
    names = common or sorted({hosts[rank] for rank in ranks if rank in hosts})
    inside = np.isin(times.ranks, members)
    exposed = float(np.median(levels(times.collective[inside] + times.pipeline[inside])[0])) if inside.any() else 0.0
    cost = min(worst.excess_ns, exposed)
    what = (
        f"a transfer between ranks {listed(members)}"
        if op == P2P
        else f"{op} of the {dimension} communicator of ranks {listed(members)}"
    )
    others = "one other that sends" if worst.peers == 1 else f"{worst.peers} others that send"
    against = f"{others} as much" if worst.peers else "its own first steps"
    evidence: list[Evidence] = [
        {
            "text": f"{what} takes {worst.took_ns / 1e6:,.2f} ms without anybody waiting, {worst.factor:.2f}x what "
            f"it takes for {against}",
            "sql": shown,
        },
        {
            "text": f"{worst.excess_ns / 1e6:,.1f} ms a step more, of which at most {cost / 1e6:,.1f} ms are not "
            "hidden behind other work",
            "sql": shown,
        },
    ]
    if len(slow) > 1 and len(ranks) < len(members):
        text = f"{len(slow)} kinds of transfers are slow; rank {listed(ranks)} takes part in all of them"
        evidence.append({"text": text, "sql": shown})
    indistinct = op != P2P and len(ranks) > 1
    if indistinct and len(ranks) == len(members):
        text = "all of its ranks take as long as its slowest link, so which of them it is does not show in their times"
        evidence.append({"text": text, "sql": shown})
    ideal = max(step_ns - cost, 0.05 * step_ns)
    where = f" on {', '.join(names[:4])}" if names else ""
    size = now.nbytes[worst.number] / max(now.calls[worst.number], 1.0)
    test = _by_halves(op, size, ranks, hosts) if indistinct else f"run NCCL's test there: {_test(op, size, 1)}."
    return Finding(
        kind="link_degradation",
        ranks=ranks,
        hosts=names,
        steps=[onset, last],
        phase=op,
        kernels=[],
        slowdown=round(step_ns / ideal, 4),
        share=cost,
        confidence=0.9 if worst.peers > 1 else 0.7,
        level="phase",
        evidence=evidence,
        action=f"Check the links of these ranks{where}: nvidia-smi nvlink -e, ibstat and the ports' error counters, "
        f"ethtool -S; {test}",
    )


def _test(op: str, size: float, each: int) -> str:
    """The command of nccl-tests that sends as much as a call of the job, with so many GPUs a process."""
    mebibytes = max(1, round(size / (1 << 20)))
    return f"{TESTS.get(op, 'all_reduce_perf')} -b {mebibytes}M -e {mebibytes}M -g {each}"


def _by_halves(op: str, size: float, ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """How to find the slow link of a communicator whose ranks all take as long: by tests of ever fewer of them. All
    GPUs of a node take part, so that all of its network cards do."""
    nodes = sorted({hosts[rank] for rank in ranks if rank in hosts})
    each = max((sum(host == node for host in hosts.values()) for node in nodes), default=0)
    half = (len(nodes) if len(nodes) > 1 else len(ranks)) // 2
    if half * (each if len(nodes) > 1 else 1) < 2:
        # Half of them would have nobody to send to.
        return f"compare what NCCL's test takes between them, and between others: {_test(op, size, len(ranks))}."
    how = f"CUDA_VISIBLE_DEVICES=… {_test(op, size, half)} on either half of the GPUs"
    if len(nodes) > 1:
        some = ",".join(nodes[:half][:4]) + (",…" if half > 4 else "")
        how = f"mpirun -N 1 -H {some} {_test(op, size, each)} on either half of the nodes"
    return (
        f"which of them it is, NCCL's tests tell by halves while the job stands: {how}, then on the halves of the "
        "slower one, and so on; where neither half is slow, the link is between them, and each is tested with some "
        "that are well."
    )
