"""What NCCL's RAS reports of a job, as JSON (``ncclras -f json -v``, or ``SET FORMAT json`` and ``VERBOSE STATUS`` at
port 28028; NCCL 2.28.7 and later): how many collectives each rank called in each communicator, and which ranks do not
answer.

A report is of one moment. Two or more of one job show whether it moves between them. RAS numbers ranks by
communicator; the job's ranks are those of its largest one.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from argus.importers.recordings.recording import MOST_NS
from argus.importers.regular import open_regular
from argus.importers.rows import HOST, ImportReport, store_run
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import printable
from argus.store.open import Store

SOURCE = "ras"
HINT = "Get one with: ncclras -f json -v > report.json (NCCL 2.28.7 and later)"
MAX_BYTES = 256 << 20
MAX_BRACKETS = 4_000_000
"""Objects and lists of a report. A rank has three in each of its communicators."""
MAX_RANKS = 200_000
TRANSFERS = frozenset({"Send", "Recv", "SendRecv", "PutSignal", "Signal", "WaitSignal"})
"""Counts of calls that not all ranks of a communicator make."""
_LACKS_COMMA = re.compile(rb'([0-9"\]}el])([ \t]*\r?\n[ \t]*")')
"""NCCL 2.28.9 leaves out a comma in its report on a missing rank."""

Process = tuple[str, int, int]
"""Host, PID and GPU."""


@dataclass
class Member:
    """A rank of a communicator: its process, its calls by kind, and ``dumped``, ``unresponsive`` or ``dead``."""

    process: Process
    counts: dict[str, int] = field(default_factory=dict)
    state: str = "dumped"

    @property
    def calls(self) -> int:
        return sum(count for name, count in self.counts.items() if name not in TRANSFERS)


@dataclass
class Report:
    """One report: communicators by their hashes, each with its members by their ranks in it."""

    path: str
    at_ns: int
    version: str
    communicators: dict[str, dict[int, Member]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def read(path: Path) -> Report:
    """One report.

    Raises:
        ArgusError: In one line, what is wrong with the file.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
        return _report(_parse(data), path)
    except OSError as error:
        raise ArgusError(f"{path} cannot be read: {error.strerror}", HINT, EXIT_UNAVAILABLE) from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))[:200]
        raise ArgusError(f"{path} is not a report of NCCL's RAS that can be read: {why}", HINT, EXIT_USAGE) from None


def _parse(data: bytes) -> Any:
    if data.count(b"{") + data.count(b"[") > MAX_BRACKETS:
        raise ValueError(f"it holds more than {MAX_BRACKETS:,} objects and lists")
    # Lines of the protocol before the report (OK, SERVER PROTOCOL 2) are not part of it.
    data = data[max(data.find(b"{"), 0) :]
    try:
        return json.loads(data)
    except ValueError as error:
        try:
            return json.loads(_LACKS_COMMA.sub(rb"\1,\2", data))
        except ValueError:
            raise error from None


def _report(content: Any, path: Path) -> Report:
    communicators = content.get("communicators") if isinstance(content, dict) else None
    if not isinstance(communicators, list):
        raise ValueError("it has no communicators")
    report = Report(str(path), _moment(content.get("timestamp"), path), _text(content.get("nccl_version")))
    for each in communicators:
        if not isinstance(each, dict):
            raise ValueError("a communicator is not an object")
        name = f"{_text(each.get('hash'))}/{_text(each.get('secondary_hash'))}"
        members: dict[int, Member] = {}
        for key in ("ranks", "missing_ranks"):
            listed = each.get(key, [])
            if not isinstance(listed, list):
                raise ValueError(f"{key} of a communicator is not a list")
            for one in listed:
                if not isinstance(one, dict):
                    raise ValueError("a rank of a communicator is not an object")
                rank = _whole(one.get("rank"))
                if not 0 <= rank < MAX_RANKS:
                    raise ValueError("a communicator lists a rank without a number")
                members[rank] = _member(one, missing=key == "missing_ranks")
        report.communicators[name] = members
        report.sizes[name] = min(max(_whole(each.get("size")), len(members)), MAX_RANKS)
    return report


def _member(one: Mapping[str, Any], *, missing: bool) -> Member:
    process = (_text(one.get("host")) or HOST, _whole(one.get("pid")), _whole(one.get("cuda_dev")))
    status = one.get("status")
    status = status if isinstance(status, dict) else {}
    if missing:
        return Member(process, state="dead" if status.get("considered_dead") is True else "unresponsive")
    counts = one.get("collective_counts", one.get("coll_op_counts"))
    if not isinstance(counts, dict):
        return Member(process)
    return Member(process, {_text(name): max(_whole(count), 0) for name, count in counts.items()})


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        return -1
    return value if -(2**31) < value < 2**62 else -1


def _text(value: Any) -> str:
    return printable(value[:200]) if isinstance(value, str) else ""


def _moment(text: Any, path: Path) -> int:
    """Wall time of a report, ns. RAS writes local time without a zone: only differences count. Of a time that no table
    takes, and without one, the file's."""
    try:
        at_ns = int(datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc).timestamp()) * 10**9
    except (TypeError, ValueError):
        at_ns = 0
    return at_ns if 0 < at_ns < MOST_NS else path.stat().st_mtime_ns


def write(store: Store, job: str, reports: Sequence[Report]) -> tuple[int, ImportReport, dict[int, Process]]:
    """Stores the last of some reports of one job as a new run, with how long nothing has moved.

    Returns:
        Number of the run; what is known of the whole; the process of each rank.

    Raises:
        ArgusError: The reports have no communicator; the store cannot be had or refuses rows.
    """
    ordered = sorted(reports, key=lambda one: one.at_ns)
    last = ordered[-1]
    ranks = _ranks(last)
    if not ranks:
        raise ArgusError(f"{last.path} has no communicator with a rank", HINT, EXIT_USAGE)
    report = ImportReport(
        ranks=list(ranks.values()), begin_ns=ordered[0].at_ns, end_ns=last.at_ns, world_size=len(ranks)
    )
    report.hosts = [process[0] for process in ranks]
    report.pids = [process[1] if 0 < process[1] < 2**32 else 0 for process in ranks]
    report.ranks = list(ranks.values())
    run = store_run(store, job, SOURCE, report, _tables(ordered, ranks), last.path)
    return run, report, {rank: process for process, rank in ranks.items()}


def _ranks(report: Report) -> dict[Process, int]:
    """Global ranks of the processes: as in the largest communicator, others behind them in order."""
    ranks: dict[Process, int] = {}
    taken: set[int] = set()
    most = -1
    for name in sorted(report.communicators, key=lambda name: -report.sizes[name]):
        members = report.communicators[name]
        for rank in sorted(members):
            process = members[rank].process
            if process not in ranks:
                ranks[process] = rank if rank not in taken else most + 1
                taken.add(ranks[process])
                most = max(most, ranks[process])
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _since(ordered: Sequence[Report], name: str) -> int:
    """Since when the calls of a communicator have been what they are, ns."""

    def calls(report: Report) -> dict[int, int] | None:
        members = report.communicators.get(name)
        return None if members is None else {rank: member.calls for rank, member in members.items()}

    latest, since = calls(ordered[-1]), ordered[-1].at_ns
    for report in reversed(ordered[:-1]):
        if calls(report) != latest:
            break
        since = report.at_ns
    return since


def _tables(ordered: Sequence[Report], ranks: Mapping[Process, int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    version, last = time.time_ns(), ordered[-1]
    states: dict[int, str] = {}
    groups: list[tuple[int, int, str, int]] = []
    members_of: list[tuple[int, list[int]]] = []
    pending: list[tuple[int, int, str, int, bool, int]] = []
    moved = {name: _since(ordered, name) for name in last.communicators}
    worked: dict[Process, int] = {}
    for name, members in last.communicators.items():
        for member in members.values():
            worked[member.process] = max(moved[name], worked.get(member.process, 0))
    for number, (name, members) in enumerate(last.communicators.items(), 1):
        label = f"communicator {name.split('/')[0]}"
        for member in members.values():
            rank = ranks[member.process]
            if states.get(rank, "dumped") == "dumped":
                states[rank] = member.state
            if member.state == "dumped":
                groups.append((rank, number, label, member.calls))
        members_of.append((number, [ranks[members[place].process] for place in sorted(members)]))
        alive = [member for member in members.values() if member.state == "dumped"]
        if len(members) < 2 or not alive:
            continue
        missing = len(alive) < len(members)
        least = min(member.calls for member in alive)
        behind = next(member for member in alive if member.calls == least)
        # A rank that is late here and makes calls elsewhere still works.
        since = max(moved[name], *(worked[member.process] for member in alive if member.calls == least))
        for member in alive:
            if member.calls > least or missing:
                # Of a communicator with ranks that do not answer, nobody can have completed what it called last.
                seq = least + 1 if member.calls > least else least
                pending.append((ranks[member.process], number, _op(member, behind), seq, missing, since))
    yield "dumps", {
        "rank": np.array(list(ranks.values()), np.uint32), "host": [process[0] for process in ranks], "source": SOURCE,
        "path": last.path, "format": "", "library": last.version,
        "state": [states.get(rank, "dumped") for rank in ranks.values()],
        "written": np.full(len(ranks), last.at_ns, np.int64), "calls": np.zeros(len(ranks), np.uint32),
        "version": version,
    }  # fmt: skip
    if groups:
        who, group, names, calls = zip(*groups, strict=True)
        count = len(groups)
        yield "dumped_groups", {
            "rank": np.array(who, np.uint32), "comm_group": np.array(group, np.uint64), "name": list(names),
            "description": list(names), "enqueued": np.array(calls, np.int64), "started": np.full(count, -1, np.int64),
            "completed": np.full(count, -1, np.int64), "transfers": np.zeros(count, np.bool_), "version": version,
        }  # fmt: skip
    yield "parallel_groups", {
        "comm_group": np.array([number for number, _ in members_of], np.uint64), "dimension": "unknown",
        "ranks": [listed for _, listed in members_of],
        "nranks": np.array([len(listed) for _, listed in members_of], np.int32),
        "confidence": np.zeros(len(members_of), np.float32), "why": "reported by NCCL's RAS", "version": version,
        "superseded": np.zeros(len(members_of), np.uint8),
    }  # fmt: skip
    if pending:
        yield "dumped_calls", _pending(pending)


def _op(member: Member, behind: Member) -> str:
    """The kind of call that a rank is ahead by."""
    ahead = Tally(member.counts)
    ahead.subtract(behind.counts)
    kinds = [name for name, count in ahead.items() if count > 0 and name not in TRANSFERS]
    return kinds[0] if len(kinds) == 1 else "collective"


def _pending(rows: Sequence[tuple[int, int, str, int, bool, int]]) -> dict[str, Any]:
    rank, group, op, seq, given_up, since = zip(*rows, strict=True)
    none, count = np.full(len(rows), -1, np.int64), len(rows)
    return {
        "rank": np.array(rank, np.uint32), "comm_group": np.array(group, np.uint64), "record": none, "name": list(op),
        "op": list(op), "p2p": np.zeros(count, np.bool_), "peer": np.full(count, -1, np.int32),
        "seq": np.array(seq, np.int64), "p2p_seq": none, "state": "scheduled", "retired": np.array(given_up, np.bool_),
        "ts": np.array(since, np.int64), "started_ns": none, "completed_ns": none, "timeout_ms": none,
        "count": np.zeros(count, np.uint64), "dtype": "", "inputs": "", "outputs": "",
        "frames": [[] for _ in range(count)],
    }  # fmt: skip
