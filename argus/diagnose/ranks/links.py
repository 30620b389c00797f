"""Links that became slow, or are slower than others that carry the same: by what transfers take, not by who waits.

A collective takes as long as its last rank's kernel runs: that one waits for nobody. So of a communicator the least
time of any rank is the transfer's, step by step; of two stages that exchange data, the shortest kernel of either. Both
hold where the whole step is no longer for it, since other work hides it. Communicators are compared with others of the
same dimension that send as much, and with their own first steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.ranks.lateness import find_onset
from argus.diagnose.ranks.slow_gpus import above, grown
from argus.diagnose.read import queries
from argus.diagnose.read.gpu_times import MIN_STEPS, PAST, WINDOWS, GpuTimes, first_steps, levels, newest_count
from argus.diagnose.read.query import runnable_sql
from argus.diagnose.read.transfers import P2P, Transfers
from argus.diagnose.suspect import Suspect, slowdown_of
from argus.diagnose.verdict import Evidence
from argus.model.statistics import low_median
from argus.model.units import duration, listed, named_hosts, rank_pattern

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LEAST = 0.2
"""Least excess of a transfer over the others. A link that lost one of its lanes, or a ring one of its network cards,
takes longer by much more; how much the others scatter is required on top (argus.diagnose.ranks.slow_gpus.SPREADS)."""
LEAST_ACROSS = 1.0
"""The same against communicators of other stages, where a stage has no second one. Those of simulated healthy pipelines
differ by less than 1 %; real ones may by more, since each overlaps with other work of its stage."""
LEAST_SHARE = 0.01
"""Less than this share of the step is not reported: ranks that come last by turns leave as much in what looks like
transfer."""
ALIKE = 0.05
"""Bytes of a step differ by less than this if as much is sent."""
USUAL_ACROSS = 3
"""Stages with such a communicator from which on most of them show what is usual."""
LEAST_OF_TWO = 3.0
"""As ``LEAST_ACROSS``, where only two stages have one. Nobody knows which of the two is usual, but the faster one shows
how long as many bytes may take, in the same steps. Stages differ in what they compute meanwhile, which slows transfers
down as well, so it has to be four times as long; and what it costs must reach the threshold besides."""
TESTS = {
    "AllGather": "all_gather_perf", "ReduceScatter": "reduce_scatter_perf", "Broadcast": "broadcast_perf",
    "Reduce": "reduce_perf", "AlltoAll": "alltoall_perf", P2P: "sendrecv_perf",
}  # fmt: skip
"""Programs of NVIDIA's nccl-tests by operation; of all others ``all_reduce_perf``."""
MUCH = 0.25
"""Share of a step from which a note reports that nothing shows whether communication could be faster."""
COMPARED_RUNS = 3
"""Healthy runs with which a baseline shows that (argus.diagnose.iteration.against_baseline.MIN_RUNS)."""
BLOCK = 10
"""Steps that are compared to see whether a transfer was slow before."""


@dataclass(frozen=True)
class SlowLink:
    """A transfer that takes longer than others, or than before.

    Attributes:
        number: Of the link, among those given.
        factor: How many times as long.
        excess_ns: Time more in a step.
        took_ns: Its time in a step, or of one transfer between two ranks.
        peers: Communicators that it was compared with; 0: with its own past.
        other: Number of the only one that is like it, on the other of two stages; -1: it was not compared so.
    """

    number: int
    factor: float
    excess_ns: float
    took_ns: float
    peers: int
    other: int = -1


def find_slow_links(
    now: Transfers,
    before: Transfers | None = None,
    *,
    least: float = LEAST,
    fewest: int = MIN_STEPS,
    hosts: Mapping[int, str] = MappingProxyType({}),
) -> list[SlowLink]:
    """Transfers that take longer than the others of their kind, those that cost most first.

    Args:
        now: Of the newest steps.
        before: Of the first ones.
        least: Excess that counts, as a share of the transfer.
        fewest: Of fewer steps nothing is concluded.
        hosts: The host of each rank, as far as they are known.
    """
    if len(now.steps) < fewest or not len(now.names):
        return []
    recent = now.took[:, -newest_count(len(now.steps)) :]
    excess = np.zeros(len(now.names))
    usual = np.full(len(now.names), np.nan)
    peers = np.zeros(len(now.names), np.int64)
    others = np.full(len(now.names), -1)
    known = ~np.isnan(recent).all(axis=1)
    for labels, across in ((now.alike, False), (_other_stages(now, hosts), True)):
        for label in np.unique(labels[labels >= 0]).tolist():
            links = np.flatnonzero((labels == label) & known)
            if len(links) > 1:
                of_two = across and len(links) < USUAL_ACROSS
                more = LEAST_OF_TWO if of_two else LEAST_ACROSS if across else least
                if of_two:
                    others[links] = links[::-1]
                norm = np.maximum(low_median(recent[links]), 1.0)
                excess[links] = above(recent[links] / norm, more)
                usual[links] = float(np.nanmedian(norm))
                peers[links[excess[links] > 0]] = len(links) - 1
    if before is not None:
        place = {name: number for number, name in enumerate(before.names)}
        both = [number for number, name in enumerate(now.names) if name in place]
        was = before.took[[place[now.names[number]] for number in both]]
        # Fewer of the first steps, too: the rest may be slow already.
        for count in sorted({min(count, was.shape[1]) for count in PAST}):
            by_past = _grown(recent[both], was[:, :count], least, [now.members[number] for number in both])
            for number, took, more in zip(both, was[:, :count], by_past.tolist(), strict=True):
                # Where more is sent than was, it takes longer.
                sent = _sent(now, number, slice(-recent.shape[1], None))
                then = _sent(before, place[now.names[number]], slice(0, count))
                if more > excess[number] and not peers[number] and abs(sent - then) <= ALIKE * sent:
                    excess[number], usual[number] = more, float(np.nanmedian(took))
    level = levels(recent)[0]
    slow_links = []
    for number in np.flatnonzero(excess > 0).tolist():
        times = now.calls[number] if now.names[number][1] == P2P else 1.0
        more, factor = (level[number] - usual[number]) * times, level[number] / usual[number]
        other = int(others[number]) if peers[number] else -1
        slow_links.append(SlowLink(number, float(factor), float(more), float(level[number]), int(peers[number]), other))
    return sorted(slow_links, key=lambda link: -link.excess_ns)


def _sent(some: Transfers, number: int, steps: slice) -> float:
    """Bytes that a link sends in a step that it is used in, of some of the steps; 0: not known."""
    if some.sent is None:
        return float(some.nbytes[number])
    sent = some.sent[number, steps]
    return float(np.median(sent[sent > 0])) if sent.any() else 0.0


def _grown(now: Float, before: Float, least: float, members: Sequence[tuple[int, ...]]) -> Float:
    """By how much transfers take longer than before, beyond what all did, as a share, shape (links,); 0 where it is not
    sure. What one communicator does is no norm for itself, whatever operations it is used for."""
    if len(set(members)) > 1:
        return grown(now, before, least)
    parts = [grown(one[None], was[None], least, alone=True) for one, was in zip(now, before, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _other_stages(some: Transfers, hosts: Mapping[int, str]) -> Int:
    """The same number for those that are alone on their stages and are compared across these; -1: not compared so. Two
    are compared only if their ranks are spread over hosts alike, as far as is known. Shape (links,)."""
    alone = np.bincount(some.alike)[some.alike] == 1 if len(some.alike) else np.empty(0, np.bool_)
    labels = np.where(alone, some.across, -1)
    for label in np.unique(labels[labels >= 0]).tolist():
        links = np.flatnonzero(labels == label).tolist()
        spread = {_spread(some.members[link], hosts) for link in links}
        if len(links) < 2 or (len(links) < USUAL_ACROSS and len(spread) > 1):
            labels[links] = -1
    return labels


def _spread(ranks: Sequence[int], hosts: Mapping[int, str]) -> tuple[int, ...]:
    """How many of these ranks each of their hosts has; of a host that is not known, nothing."""
    return tuple(sorted(Counter(hosts[rank] for rank in ranks if rank in hosts).values()))


@dataclass(eq=False, kw_only=True)
class SlowLinkSuspect(Suspect):
    """A slow link. ``unburdened``: the transfers of the newest steps as they would be if it took what is usual."""

    unburdened: Transfers


def detect(case: Case) -> list[Suspect]:
    """The link that all slow transfers have in common: one suspect at most."""
    return of_steps(case, MIN_STEPS)


def of_steps(case: Case, fewest: int) -> list[Suspect]:
    """:func:`detect` in so many steps at least."""
    if (carried := case.transfers) is None or case.gpus is None:
        return []
    now, dimensions, read, newest = carried.now, carried.dimensions, carried.read, carried.newest
    numbers, hosts = case.numbers, case.hosts
    first = first_steps(numbers)[: len(newest)]
    # Their own past is needed by those that have no like.
    alone = len(now.names) > 0 and bool((np.bincount(now.alike) == 1).any())
    before = read(first) if len(first) and alone else None
    step_ns = float(np.median(case.durations[-WINDOWS[0] :]))
    slow = [
        link
        for link in find_slow_links(now, before, fewest=fewest, hosts=hosts)
        if link.other < 0 or _cost(case, now, link) >= case.threshold * step_ns
        if link.peers or now.nbytes[link.number] or not _more_to_do(case, now.members[link.number], link.factor)
    ]
    if not slow or slow[0].excess_ns < LEAST_SHARE * step_ns:
        return []
    worst = slow[0]
    kind = [number for number, name in enumerate(now.names) if name[1] == now.names[worst.number][1]]
    if len(kind) > 2 and 2 * sum(link.number in kind for link in slow) > len(kind):
        return []  # nearly all: more is sent, or the network as a whole is slow
    # A rank or a host that all slow transfers have in common is where the link is.
    ranks = set(now.members[worst.number])
    places = {hosts[rank] for rank in ranks if rank in hosts}
    for link in slow[1:]:
        ranks = ranks & set(now.members[link.number]) or ranks
        places = places & {hosts[rank] for rank in now.members[link.number] if rank in hosts} or places
    common = sorted(places if len(slow) > 1 else ())
    took = now.took.copy()
    for link in slow:
        if ranks & set(now.members[link.number]):
            took[link.number] /= link.factor
    what = dimensions.get(now.names[worst.number][0], "unknown")
    since = onset(now, before, worst, newest, numbers, read, hosts)
    return [_suspect(case, now, slow, sorted(ranks), common, what, since, replace(now, took=took))]


def _more_to_do(case: Case, members: tuple[int, ...], factor: float) -> bool:
    """Whether the GPUs of a transfer's ranks compute longer than in the first steps, too, by half as much at least:
    where it is not known what is sent, that may be more as well."""
    if case.gpus is None or case.gpus.before is None:
        return False
    now, before = case.gpus.now, case.gpus.before
    level = levels(now.cut(slice(-newest_count(len(now.steps)), None)).compute[np.isin(now.ranks, members)])[0]
    was = levels(before.cut(slice(0, PAST[-1])).compute[np.isin(before.ranks, members)])[0]
    if not len(level) or not len(was) or not np.median(was) > 0:
        return False
    return bool(np.median(level) / np.median(was) - 1 >= (factor - 1) / 2)


def without_like(case: Case) -> str:
    """A clause for a healthy job that communicates for much of its step in a communicator that nothing can be compared
    with, so that a network which was slow all along does not show; empty: it does not."""
    history = len(case.baseline.runs) if case.baseline is not None else 0
    if case.gpus is None or case.transfers is None or history >= COMPARED_RUNS:
        return ""
    now, times = case.transfers.now, case.gpus.now
    share = float(np.nanmedian(levels(times.collective)[0] / np.maximum(levels(times.step)[0], 1.0)))
    spent = np.array([
        np.nan if op == P2P or len(members) < 2 else low_median(took[None, ~np.isnan(took)]).mean()
        for (_, op, _), members, took in zip(now.names, now.members, now.took, strict=True)
    ])  # fmt: skip
    if share < MUCH or np.isnan(spent).all():
        return ""
    most = int(np.nanargmax(spent))
    labels = now.alike if np.count_nonzero(now.alike == now.alike[most]) > 1 else _other_stages(now, case.hosts)
    if labels[most] >= 0 and np.count_nonzero(labels == labels[most]) > 1:
        return ""
    op = now.names[most][1]
    size = now.nbytes[most] / max(now.calls[most], 1.0)
    return (
        f"communication takes {share:.0%} of a step, most of it {op} of ranks {rank_pattern(now.members[most])}, with "
        "no other communicator to compare it with: links that were slow all along would not show (to test them: "
        f"{nccl_test(op, size, 1)})"
    )


def onset(
    now: Transfers,
    before: Transfers | None,
    slow: SlowLink,
    newest: Int,
    numbers: Int,
    read: Callable[[Int], Transfers],
    hosts: Mapping[int, str],
) -> int:
    """The step since which a transfer is slow.

    Args:
        now: Transfers of the newest steps.
        before: Of the first; None: not read.
        slow: Which of them, and how slow it is.
        newest: The newest steps, shape (n,).
        numbers: All steps, shape (m,).
        read: Reads those of other steps.
        hosts: Of each rank.
    """
    name = now.names[slow.number]

    def lead(some: Transfers) -> Float:
        if name not in some.names:
            return np.zeros(len(some.steps))
        number = some.names.index(name)
        labels = some.alike if np.count_nonzero(some.alike == some.alike[number]) > 1 else _other_stages(some, hosts)
        others = np.flatnonzero(labels == labels[number])
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


def _suspect(
    case: Case,
    now: Transfers,
    slow: list[SlowLink],
    ranks: list[int],
    common: list[str],
    dimension: str,
    since: int,
    unburdened: Transfers,
) -> SlowLinkSuspect:
    assert case.transfers is not None
    worst = slow[0]
    members, op = now.members[worst.number], now.names[worst.number][1]
    shown = runnable_sql(queries.TRANSFERS, case.transfers.window)
    hosts, cost = case.hosts, _cost(case, now, worst, since)
    names = common or sorted({hosts[rank] for rank in ranks if rank in hosts})
    what = (
        f"a transfer between ranks {listed(members)}"
        if op == P2P
        else f"{op} of the {'' if dimension == 'unknown' else dimension + ' '}communicator of ranks {listed(members)}"
    )
    others = "one other that sends" if worst.peers == 1 else f"{worst.peers} others that send"
    against = f"{others} as much" if worst.peers else "its own first steps"
    evidence: list[Evidence] = [
        {
            "text": f"{what} takes {duration(worst.took_ns)} without anybody waiting, {worst.factor:.2f}x what "
            f"it takes for {against}",
            "sql": shown,
        },
        {
            "text": f"{duration(worst.excess_ns)} a step more, of which at most {duration(cost)} are not "
            "hidden behind other work",
            "sql": shown,
        },
    ]
    if worst.other >= 0:
        evidence.append({"text": _of_two(now, worst, hosts), "sql": shown})
    if len(slow) > 1 and len(ranks) < len(members):
        text = f"{len(slow)} kinds of transfers are slow; rank {listed(ranks)} takes part in all of them"
        evidence.append({"text": text, "sql": shown})
    indistinct = op != P2P and len(ranks) > 1
    if indistinct and len(ranks) == len(members):
        text = "all of its ranks take as long as its slowest link, so which of them it is does not show in their times"
        evidence.append({"text": text, "sql": shown})
    known = named_hosts(names)
    where = f" on {', '.join(known[:4])}" if known else ""
    size = now.nbytes[worst.number] / max(now.calls[worst.number], 1.0)
    test = _by_halves(op, size, ranks, hosts) if indistinct else f"run NCCL's test there: {nccl_test(op, size, 1)}."
    return SlowLinkSuspect(
        kind="link_degradation",
        ranks=ranks,
        hosts=names,
        since=since,
        last=case.last,
        phase=op,
        lost_ns=cost,
        slowdown=slowdown_of(case.taken_ns(since), cost),
        confidence=0.9 if worst.peers > 1 else 0.7,
        level="phase",
        evidence=evidence,
        action=f"Check the links of these ranks{where}: nvidia-smi nvlink -e, ibstat and the ports' error counters, "
        f"ethtool -S; {test}",
        unburdened=unburdened,
    )


def exposed_ns(case: Case, members: tuple[int, ...], since: int) -> Float:
    """How long each rank of a transfer waits for it at most, with nothing else to do, in a step since it is slow; where
    enough of the first steps were before that, how much longer than then. Shape (ranks,), one at least."""
    assert case.gpus is not None

    def typical(times: GpuTimes) -> Float:
        inside = np.isin(times.ranks, members)
        return levels(times.collective[inside] + times.pipeline[inside])[0] if inside.any() else np.zeros(1)

    now, first = case.gpus.now, case.gpus.before
    exposed = typical(now.cut(now.steps >= case.recently(since)[0]))
    if first is not None and np.array_equal(first.ranks, now.ranks) and np.sum(first.steps < since) >= MIN_STEPS:
        exposed = exposed - typical(first.cut(first.steps < since))
    return np.maximum(exposed, 0.0)


def _cost(case: Case, now: Transfers, slow: SlowLink, since: int = 0) -> float:
    """What a slow link costs a step at most: what other work does not hide, ns."""
    return min(slow.excess_ns, float(np.median(exposed_ns(case, now.members[slow.number], since))))


def _of_two(now: Transfers, slow: SlowLink, hosts: Mapping[int, str]) -> str:
    """What the communicator of the other stage shows."""
    there = listed(now.members[slow.other])
    text = (
        f"in the same steps ranks {there}, which are another stage, send as much in "
        f"{duration(slow.took_ns / slow.factor)}"
    )
    if not set(now.members[slow.number]) <= set(hosts):
        text += "; on which nodes either are is not known: on more nodes it may take longer"
    return text


def nccl_test(op: str, size: float, each: int) -> str:
    """The command of nccl-tests that sends as much as a call of the job (``size``, bytes; 0: not known), with so many
    GPUs a process."""
    mebibytes = max(1, round(size / (1 << 20)))
    sizes = f"-b {mebibytes}M -e {mebibytes}M" if size else "-b 1M -e 1G -f 4"
    return f"{TESTS.get(op, 'all_reduce_perf')} {sizes} -g {each}"


def _by_halves(op: str, size: float, ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """How to find the slow link of a communicator whose ranks all take as long: by tests of ever fewer of them. All
    GPUs of a node take part, so that all of its network cards do."""
    nodes = sorted({hosts[rank] for rank in ranks if rank in hosts})
    each = max((sum(host == node for host in hosts.values()) for node in nodes), default=0)
    half = (len(nodes) if len(nodes) > 1 else len(ranks)) // 2
    if half * (each if len(nodes) > 1 else 1) < 2:
        # Half of them would have nobody to send to.
        return f"compare what NCCL's test takes between them, and between others: {nccl_test(op, size, len(ranks))}."
    how = f"CUDA_VISIBLE_DEVICES=… {nccl_test(op, size, half)} on either half of the GPUs"
    if len(nodes) > 1:
        some = ",".join(nodes[:half][:4]) + (",…" if half > 4 else "")
        how = f"mpirun -N 1 -H {some} {nccl_test(op, size, each)} on either half of the nodes"
    return (
        f"to find which of them it is, run NCCL's tests by halves while the job stands: {how}, then on the halves of "
        "the slower one, and so on; where neither half is slow, the link is between them, and each is tested with some "
        "that are well."
    )
