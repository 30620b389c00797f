"""Dumps of PyTorch's NCCL flight recorder: which collectives each rank called last, and how far they had come.

Each rank writes a file of its own: a pickle (``TORCH_FR_DUMP_TEMP_FILE``, ``_dump_nccl_trace``) or JSON
(``_dump_nccl_trace_json``), of format 2.0 to 2.10. Later formats added fields; which are there decides, not the number:

* ``entries``: one a call, in the order in which the CPU made them (``record_id``), up to the size of the ring; only
those
  that had not completed, where the dump was made so. ``collective_seq_id`` counts the collectives of a process group on
  this rank, ``p2p_seq_id`` its sends and receives. ``retired`` without completion: it timed out.
* ``pg_config`` (2.2): name, description and global ranks of each process group that this rank is in.
* ``pg_status`` (2.3): the last call that each process group enqueued, started and completed, by ``pg_id``, which
differs
  from rank to rank. Of a group with sends and receives it is the number of either.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argus.importers.dumps import plain_pickle
from argus.importers.recordings.recording import Progress
from argus.importers.regular import open_regular
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import printable

HINT = (
    "Set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE=2000; each rank then writes TORCH_FR_DUMP_TEMP_FILE + "
    "its rank"
)
MAX_ENTRIES = 250_000
"""Entries of one dump."""
MAX_RANKS = 200_000
"""Ranks of one job."""
MAX_FILES = 200_000
MAX_FRAMES = 24
"""Innermost frames of a call that are kept: those of PyTorch's own wrappers and of the training loop."""
MAX_TENSORS, MAX_DIMENSIONS = 1024, 8
"""Tensors of a call whose sizes are read, and dimensions of each."""
MAX_NUMBERS = 4_000_000
"""Sizes, frames and ranks that the calls and process groups of a dump refer to, all together: a pickle of a few bytes
can refer to one list again and again. 100,000 entries with 24 frames and two tensors each have 3 million."""
MAX_TEXT = 300
MAX_JSON_BRACKETS = 3_000_000
"""Containers of a JSON dump, as of a pickled one: an empty list of three bytes takes 64."""

_OPS = {
    "all_reduce": "AllReduce", "allreduce": "AllReduce", "all_reduce_barrier": "Barrier", "barrier": "Barrier",
    "allreduce_coalesced": "AllReduce", "all_gather": "AllGather", "_all_gather_base": "AllGather",
    "all_gather_single": "AllGather", "all_gather_v": "AllGather", "all_gather_into_tensor_coalesced": "AllGather",
    "allgather_coalesced": "AllGather", "reduce_scatter": "ReduceScatter", "_reduce_scatter_base": "ReduceScatter",
    "reduce_scatter_single": "ReduceScatter", "reduce_scatter_v": "ReduceScatter",
    "reduce_scatter_tensor_coalesced": "ReduceScatter", "reduce_scatter_coalesced": "ReduceScatter",
    "all_to_all": "AlltoAll", "all_to_all_single": "AlltoAll", "all_to_all_v_single": "AlltoAll",
    "broadcast": "Broadcast", "_broadcast_oop": "Broadcast", "reduce": "Reduce", "_reduce_oop": "Reduce",
    "gather": "Gather", "scatter": "Scatter", "send": "Send", "recv": "Recv", "coalesced": "Coalesced",
}  # fmt: skip
"""Values of ``profiling_name``, as the table ``collectives`` names them."""
_P2P = re.compile(r"(send|recv)\s+(\d{1,9})\s*(?:->|<-)\s*(\d{1,9})")
_DTYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("uint8", 1), "Float8_e4m3fn": ("float8e4m3", 1), "Float8_e5m2": ("float8e5m2", 1),
}  # fmt: skip
_RANK_WORD = re.compile(r"rank[_.-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,7})(?=\D*$)")
_NUMBER = re.compile(r"\d{1,9}")
_PICKLED = re.compile(rb"\x80|\(d(p\d+\n|[VS.])|\}[q(rXU.]")
"""How a pickled dictionary begins: with its protocol (2 and later), or as one on the stack of protocol 0, or 1."""
STATES = ("scheduled", "started", "completed")
LEAST_BATCHES = 3
"""So many sends and receives, each followed by a number that was left out, are batches of one."""
_STATE = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")


@dataclass(frozen=True)
class Group:
    """A process group. ``ranks``: global ranks in the order of their ranks in the group; empty: not known."""

    id: int
    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Status:
    """The last call of a process group that was enqueued, started, completed; -1: none, or not recorded."""

    enqueued: int
    started: int
    completed: int


@dataclass
class Dump:
    """What one rank's flight recorder held.

    Attributes:
        path, rank: The file and the global rank.
        version, library: Of the format, and of NCCL; empty: not recorded.
        written_ns: When the file was last written, wall-clock ns.
        groups: By id.
        status: By the group's id.
        calls: Columns of the table ``dumped_calls``, but for those of the run.
        counters: What was left out or guessed.
    """

    path: str
    rank: int
    version: str
    library: str
    written_ns: int
    groups: dict[int, Group] = field(default_factory=dict)
    status: dict[int, Status] = field(default_factory=dict)
    calls: dict[str, list[Any]] = field(default_factory=dict)
    counters: Tally[str] = field(default_factory=Tally)

    @property
    def span(self) -> tuple[int, int]:
        """First and last time in it, ns; (0, 0): none."""
        times = [at for name in ("ts", "completed_ns") for at in self.calls.get(name, []) if at > 0]
        return (min(times), max(times)) if times else (0, 0)


CALL_COLUMNS = (
    "comm", "record", "name", "op", "p2p", "peer", "seq", "p2p_seq", "state", "retired", "ts", "started_ns",
    "completed_ns", "timeout_ms", "count", "bytes", "dtype", "inputs", "outputs", "frames",
)  # fmt: skip


def find_dumps(paths: Sequence[Path], counters: Tally[str]) -> list[Path]:
    """The files to read: those named, and of folders all that look like dumps (of their subfolders, where a folder
    itself has none), sorted by name.

    Raises:
        ArgusError: One does not exist, or a folder has none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = _inside(sorted(one for one in path.iterdir() if one.is_file()), counters)
            inside = inside or _inside(sorted(one for one in path.glob("*/*") if one.is_file()), counters)
            if not inside:
                raise ArgusError(f"{path} has no flight-recorder dump", HINT, EXIT_UNAVAILABLE)
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            what = "is not a file" if path.exists() else "does not exist"
            raise ArgusError(f"{path} {what}", HINT, EXIT_UNAVAILABLE)
    if len(files) > MAX_FILES:
        raise ArgusError(f"{len(files):,} files are more than {MAX_FILES:,}", "Import one job at a time", EXIT_USAGE)
    return list(dict.fromkeys(files))


def _inside(files: list[Path], counters: Tally[str]) -> list[Path]:
    kept = []
    for path in files:
        try:
            with open_regular(path) as file:
                head = file.read(64)
        except OSError as error:
            raise ArgusError(f"{path} cannot be read: {error.strerror}", "", EXIT_UNAVAILABLE) from None
        if _PICKLED.match(head) or head.lstrip()[:1] == b"{" or (not head and _rank_in_name(path.name) >= 0):
            kept.append(path)
        else:
            counters["files_of_other_kinds"] += 1
    return kept


def read_all(paths: Sequence[Path], progress: Progress = lambda what, share: None) -> tuple[list[Dump], Tally[str]]:
    """Every dump, by rank, and what was counted on the way.

    Raises:
        ArgusError: A file cannot be read, or is not a dump; two are of one rank; none is left.
    """
    counters: Tally[str] = Tally()
    files = find_dumps(paths, counters)
    dumps: dict[int, Dump] = {}
    for number, path in enumerate(files):
        progress(path.name, number / len(files))
        if not path.stat().st_size:
            counters["dumps_empty"] += 1
            continue
        dump = read(path)
        if dump.rank in dumps:
            raise ArgusError(
                f"{dumps[dump.rank].path} and {path} are both of rank {dump.rank}",
                "Import the dumps of one hang, one file a rank; others under a --job name of their own",
                EXIT_USAGE,
            )
        dumps[dump.rank] = dump
        counters += dump.counters
    if not dumps:
        raise ArgusError(f"{files[0]} is empty, and there is no other dump", HINT, EXIT_UNAVAILABLE)
    return [dumps[rank] for rank in sorted(dumps)], counters


def read(path: Path) -> Dump:
    """One dump.

    Raises:
        ArgusError: In one line, what is wrong with the file and where.
    """
    try:
        size = path.stat().st_size
        if size > plain_pickle.MAX_BYTES:
            raise plain_pickle.NotPlain(f"it has {size:,} bytes, over {plain_pickle.MAX_BYTES:,}")
        with open_regular(path) as file:
            data = file.read(plain_pickle.MAX_BYTES + 1)
        written_ns = path.stat().st_mtime_ns
        content = _json(data) if data.lstrip()[:1] in (b"{", b"[") else plain_pickle.loads(data)
        return _dump(content, path, written_ns)
    except OSError as error:
        raise ArgusError(f"{path} cannot be read: {error.strerror}", "", EXIT_UNAVAILABLE) from None
    except ValueError as error:
        raise ArgusError(
            f"{path} is not a flight-recorder dump that can be read: {printable(str(error))[:MAX_TEXT]}",
            "Without it its rank counts as one without a dump",
            EXIT_USAGE,
        ) from None


def _json(data: bytes) -> Any:
    if data.count(b"[") + data.count(b"{") > MAX_JSON_BRACKETS:
        raise ValueError(f"it holds more than {MAX_JSON_BRACKETS:,} containers")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _dump(content: Any, path: Path, written_ns: int) -> Dump:
    if not isinstance(content, dict) or not ({"entries", "pg_config", "pg_status"} & set(content)):
        raise ValueError("it has neither entries nor pg_config")
    version = _text(content.get("version", ""))
    if version.split(".")[0] not in ("", "1", "2"):
        raise ValueError(f"its format {version!r} is not known (2.0 to 2.10 are)")
    entries = content.get("entries", [])
    if not isinstance(entries, (list, tuple)):
        raise ValueError("its entries are not a list")
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"it has {len(entries):,} entries, over {MAX_ENTRIES:,}")
    dump = Dump(
        str(path),
        -1,
        version,
        _text(content.get("nccl_version", "") or content.get("comm_lib_version", "")),
        written_ns,
    )
    parts = _Parts()
    named = _groups(content.get("pg_config"), parts)
    dump.groups = {group.id: group for group in named.values()}
    dump.rank = _rank(path, named)
    _read_entries(dump, entries, named, content.get("pg_status"), parts)
    return dump


def _groups(config: Any, parts: _Parts) -> dict[str, Group]:
    """The process groups by name."""
    groups: dict[str, Group] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        if not isinstance(value, dict):
            raise ValueError("a process group of pg_config is not a dictionary")
        name = _text(value.get("name", key))
        ranks = parts.ranks(value.get("ranks"))
        groups[name] = _group(name, _text(value.get("desc", "")), ranks)
    return groups


def _group(name: str, description: str, ranks: tuple[int, ...]) -> Group:
    """Groups of one name but of other ranks are different ones."""
    whose = ",".join(map(str, ranks)) if ranks else description
    digest = hashlib.blake2b(f"{name}\0{whose}".encode(), digest_size=8).digest()
    return Group(int.from_bytes(digest, "little"), name, description, ranks)


def _ranks(value: Any) -> tuple[int, ...]:
    """``"[0, 1, 2]"`` or a list of numbers; empty: not known."""
    if isinstance(value, str):
        numbers = [int(text) for text in _NUMBER.findall(value)]
    elif isinstance(value, (list, tuple)):
        numbers = [_whole(one) for one in value]
    else:
        return ()
    if len(numbers) > MAX_RANKS or any(not 0 <= number < MAX_RANKS for number in numbers):
        raise ValueError(f"a process group has ranks beyond {MAX_RANKS:,}")
    return tuple(dict.fromkeys(numbers))


def _rank_in_name(name: str) -> int:
    match = _RANK_WORD.search(name) or _LAST_NUMBER.search(name)
    return int(match[1]) if match else -1


def _rank(path: Path, groups: Mapping[str, Group]) -> int:
    """The rank that wrote a dump: one that is in all of its groups, which of several by the file's name."""
    possible: set[int] | None = None
    # Groups may share one tuple.
    for ranks in {id(group.ranks): group.ranks for group in groups.values() if group.ranks}.values():
        possible = set(ranks) if possible is None else possible & set(ranks)
    by_name = _rank_in_name(path.name)
    if possible is not None and len(possible) == 1:
        return next(iter(possible))
    if by_name < 0 or by_name >= MAX_RANKS:
        raise ValueError("neither its name nor its process groups give its rank (name it nccl_trace_rank_N)")
    if possible and by_name not in possible:
        raise ValueError(f"its name gives rank {by_name}, which is not in its process groups")
    return by_name


def _read_entries(dump: Dump, entries: Sequence[Any], named: Mapping[str, Group], status: Any, parts: _Parts) -> None:
    rows: list[tuple[Any, ...]] = []
    by_pg_id: dict[int, int] = {}
    guessed = dict(named)
    for entry in _resolve_coalesced(dump, entries):
        name, description = _names(entry.get("process_group"), entry.get("pg_id"))
        group = guessed.get(name)
        if group is None:
            group = guessed[name] = _group(name, description, ())
            dump.groups[group.id] = group
        by_pg_id[_whole(entry.get("pg_id"))] = group.id
        rows.append(_row(entry, group, dump, parts))
    dump.calls = dict(zip(CALL_COLUMNS, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    by_pg_id = _all_ids(by_pg_id, named, status)
    for pg_id, each in status.items() if isinstance(status, dict) else ():
        if not isinstance(each, dict):
            raise ValueError("a process group of pg_status is not a dictionary")
        number = _whole(pg_id)
        known = by_pg_id.get(number)
        if known is None:
            dump.counters["statuses_without_group"] += 1
            continue
        dump.status[known] = Status(
            *(_whole(each.get(f"last_{what}_collective")) for what in ("enqueued", "started", "completed"))
        )


def _resolve_coalesced(dump: Dump, entries: Sequence[Any]) -> list[dict[Any, Any]]:
    """Entries in which the calls of a coalesced group (``batch_isend_irecv``, a gather of uneven parts) have the state
    of the whole: PyTorch leaves them "scheduled" for ever, and updates the entry ``coalesced`` behind them alone. Dumps
    that leave out what completed have numbers missing; there a group without that entry counts as completed
    (``transfers_without_state``).

    Raises:
        ValueError: An entry is no dictionary.
    """
    done: list[dict[Any, Any]] = []
    parts: dict[tuple[Any, ...], list[int]] = {}
    batches = False
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError("an entry is not a dictionary")
        key = tuple(_whole(entry.get(name)) for name in ("pg_id", "collective_seq_id", "p2p_seq_id"))
        if _bare_name(entry) == "coalesced":
            batches = True
            inside = parts.pop(key, [])
            for place in inside:
                done[place] = {**done[place], **{name: entry[name] for name in _STATE if name in entry}}
            entry = {**entry, "is_p2p": entry.get("is_p2p") is True or any(_is_p2p(done[place]) for place in inside)}
        elif entry.get("state") == "scheduled" and "p2p_seq_id" in entry:
            parts.setdefault(key, []).append(len(done))
        done.append(entry)
    numbers = sorted(_whole(entry.get("record_id")) for entry in done)
    followed = {low for low, high in itertools.pairwise(numbers) if high - low > 1 and low >= 0}
    if followed:
        transfers = [place for place in itertools.chain(*parts.values()) if _is_p2p(done[place])]
        batches = batches or any(len(places) > 1 for places in parts.values())
        # Batches of one: what lacks behind each is the group's own entry.
        behind = {_whole(done[place].get("record_id")) for place in transfers} - {numbers[-1]}
        if batches or (len(behind) >= LEAST_BATCHES and behind <= followed):
            for place in transfers:
                done[place] = {**done[place], "state": "completed"}
            dump.counters["transfers_without_state"] += len(transfers)
    return done


def _bare_name(entry: dict[Any, Any]) -> str:
    return _text(entry.get("profiling_name", "")).split(":", 1)[-1].strip()


def _is_p2p(entry: dict[Any, Any]) -> bool:
    return entry.get("is_p2p") is True or _P2P.fullmatch(_bare_name(entry)) is not None


def _all_ids(by_pg_id: dict[int, int], named: Mapping[str, Group], status: Any) -> dict[int, int]:
    """Which process group each number in ``pg_status`` stands for, where not all of them have entries: both names and
    numbers count up in the order in which the groups were made."""
    ids = sorted({_whole(pg_id) for pg_id in status} if isinstance(status, dict) else set())
    names = [name for name in named if re.fullmatch(r"[0-9]{1,9}", name)]
    if len(names) != len(named) or len(ids) != len(names):
        return by_pg_id
    in_order = {pg_id: named[name].id for pg_id, name in zip(ids, sorted(names, key=int), strict=True)}
    return in_order if all(in_order.get(pg_id) == group for pg_id, group in by_pg_id.items()) else by_pg_id


def _names(value: Any, pg_id: Any) -> tuple[str, str]:
    if isinstance(value, (list, tuple)) and value:
        return _text(value[0]), _text(value[1]) if len(value) > 1 else ""
    return (_text(value), "") if isinstance(value, str) else (f"#{_whole(pg_id)}", "")


def _row(entry: dict[Any, Any], group: Group, dump: Dump, parts: _Parts) -> tuple[Any, ...]:
    name, bare = _text(entry.get("profiling_name", "")), _bare_name(entry)
    p2p = _P2P.fullmatch(bare)
    op = _OPS.get(bare.split(" ")[0].lower(), "")
    if not op:
        dump.counters["calls_of_unknown_kinds"] += 1
        op = printable(bare)[:40] or "unknown"
    inputs, outputs = parts.sizes(entry.get("input_sizes")), parts.sizes(entry.get("output_sizes"))
    source = outputs if op == "ReduceScatter" else inputs or outputs
    types = entry.get("output_dtypes" if source is outputs else "input_dtypes")
    dtype, width = _DTYPES.get(_text(types[0]) if isinstance(types, (list, tuple)) and types else "", ("unknown", 0))
    count = min(sum(math.prod(size) for size in source), 2**62)
    state = _text(entry.get("state", ""))
    completed = _time(entry.get("time_discovered_completed_ns"))
    if state not in STATES:
        state = "completed" if completed > 0 else "scheduled"
    seq, p2p_seq = _whole(entry.get("collective_seq_id", entry.get("seq_id"))), _whole(entry.get("p2p_seq_id"))
    return (
        group.id, _whole(entry.get("record_id", entry.get("id"))), name, op,
        p2p is not None or entry.get("is_p2p") is True, int(p2p[3]) if p2p else -1, seq, p2p_seq, state,
        entry.get("retired") is True, _time(entry.get("time_created_ns")),
        _time(entry.get("time_discovered_started_ns")), completed, _whole(entry.get("timeout_ms")), count,
        min(count * width, 2**62), dtype, _shown(inputs), _shown(outputs), parts.frames(entry.get("frames")),
    )  # fmt: skip


def _shown(sizes: list[list[int]]) -> str:
    return " ".join("x".join(map(str, size)) or "1" for size in sizes[:16])[:MAX_TEXT]


class _Parts:
    """Sizes and frames of a dump's calls, and ranks of its process groups. What they share is read once: each frame,
    and each list of ranks."""

    def __init__(self) -> None:
        self._left = MAX_NUMBERS
        self._words: dict[int, str] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"its calls refer to more than {MAX_NUMBERS:,} sizes and frames, or ranks")

    def ranks(self, value: Any) -> tuple[int, ...]:
        """Of a process group. Each group has a hash of its ranks, and a row that lists them."""
        known = self._ranks.get(id(value))
        if known is None:
            known = self._ranks[id(value)] = _ranks(value)
        self._spend(len(known))
        return known

    def sizes(self, value: Any) -> list[list[int]]:
        """Of each tensor."""
        if not isinstance(value, (list, tuple)):
            return []
        sizes = []
        for size in value[:MAX_TENSORS]:
            if isinstance(size, (list, tuple)):
                self._spend(1 + len(size[:MAX_DIMENSIONS]))
                sizes.append([max(_whole(one), 0) for one in size[:MAX_DIMENSIONS]])
        return sizes

    def frames(self, value: Any) -> list[str]:
        """``function (file:line)``, innermost first."""
        if not isinstance(value, (list, tuple)):
            return []
        self._spend(len(value[:MAX_FRAMES]))
        return [self._frame(frame) for frame in value[:MAX_FRAMES] if isinstance(frame, dict)]

    def _frame(self, frame: dict[Any, Any]) -> str:
        if (known := self._words.get(id(frame))) is not None:
            return known
        line = max(_whole(frame.get("line")), 0)
        words = f"{_text(frame.get('name', ''))} ({_text(frame.get('filename', ''))}:{line})"
        self._words[id(frame)] = words
        return words


def _whole(value: Any) -> int:
    """A number of 62 bits at most; -1: there is none."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return -1
    return value if -(2**62) < value < 2**62 else -1


def _time(value: Any) -> int:
    """Nanoseconds since 1970; -1: not recorded. JSON dumps have 0 for none."""
    value_ns = _whole(value)
    return value_ns if value_ns > 0 else -1


def _text(value: Any) -> str:
    return printable(value[:MAX_TEXT]) if isinstance(value, str) else ""


def members(dumps: Sequence[Dump]) -> dict[int, Group]:
    """Every process group by its id, with the ranks seen in it where no dump lists them."""
    groups: dict[int, Group] = {}
    for dump in dumps:
        groups.update({group.id: group for group in dump.groups.values()})
    return groups


def all_ranks(dumps: Sequence[Dump]) -> list[int]:
    """Ranks that wrote a dump or are in a process group of one that did."""
    ranks = {dump.rank for dump in dumps}
    for group in members(dumps).values():
        ranks.update(group.ranks)
    return sorted(ranks)


def iterate(dumps: Sequence[Dump]) -> Iterator[tuple[Dump, dict[str, list[Any]]]]:
    """Dumps that hold calls, with them."""
    for dump in dumps:
        if dump.calls:
            yield dump, dump.calls
