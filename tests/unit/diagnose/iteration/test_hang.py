"""Who holds up a job that hangs, and where those ranks' threads are."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest

from argus.diagnose.causes.stacks import StackReader, compare, parting
from argus.diagnose.iteration.hang import Stuck, not_downstream, root_causes, stuck_calls, stuck_transfers
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict, json_schema
from argus.model.stacks import Stack
from argus.store.open import Store, open_store
from argus.store.read.stacks import Thread
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.stack_data import MS, T0, Row, native, py, stack, store_run, store_stacks
from tests.stores import new_store

STEP_MS, STEPS = 100, 30
HUNG_MS = STEP_MS * STEPS


# ---- who


def last_calls(*groups: dict[int, int]) -> tuple[list[int], list[int], list[int]]:
    rows = [(group, rank, seq) for group, members in enumerate(groups) for rank, seq in members.items()]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def test_the_collective_that_is_waited_in_is_the_first_that_somebody_misses() -> None:
    """Ranks that do not wait for their GPU's result run ahead: they are no reason to blame those in between."""
    stuck = stuck_calls(*last_calls({0: 105, 1: 103, 2: 100, 3: 105}))
    assert stuck == [Stuck(0, 101, (0, 1, 3), (2,))]
    assert root_causes(stuck) == ([2], False)
    assert stuck_calls(*last_calls({0: 7, 1: 7})) == []
    assert root_causes([]) == ([], False)


def test_who_waits_for_somebody_else_is_not_blamed() -> None:
    """Tensor parallel pairs 0,1 and 2,3, data parallel pairs 0,2 and 1,3. 3 hangs: 1 and 2 wait for it, 0 for 1."""
    stuck = stuck_calls(*last_calls({0: 51, 1: 50}, {2: 51, 3: 50}, {0: 9, 2: 9}, {1: 10, 3: 9}))
    assert root_causes(stuck) == ([3], False)
    # 1 is behind in one, but waits in the other.
    assert {1, 3} == {rank for one in stuck for rank in one.missing}


def test_ranks_that_wait_for_one_another_are_a_circle() -> None:
    stuck = stuck_calls(*last_calls({0: 5, 1: 4}, {0: 7, 1: 8}))
    assert root_causes(stuck) == ([0, 1], True)
    # Who waits for them, and is waited for, is a victim.
    victims = [Stuck(7, 3, (2,), (0,)), Stuck(8, 5, (3,), (2,))]
    assert root_causes([*stuck, *victims]) == ([0, 1], True)


# ---- where


MAIN = py("<module>", 90)


def test_a_stack_parts_from_another_where_its_functions_do() -> None:
    train = py("train", 20)
    hung = [MAIN, py("train", 31), py("load", 5), py("wait", 99, "/usr/lib/python3.11/threading.py"), native("futex")]
    usual = [MAIN, train, native("poll")]
    assert hung[parting(hung, usual)].function == "load"
    assert usual[parting(usual, hung)] == train
    # The same functions: the deepest of those with another line.
    assert parting([MAIN, py("train", 20)], [MAIN, py("train", 21)]) == 1
    assert parting([py("<module>", 1), train], [MAIN, train]) == 0
    assert parting([MAIN, train], [MAIN, train]) == 1
    # No Python.
    assert parting([native("main"), native("a"), native("b")], [native("main"), native("c")]) == 1
    assert parting([], usual) == -1
    assert hung[parting(hung, [])].function == "<module>"


def thread(rank: int, where: Stack, role: str = "main", reason: str = "futex") -> Thread:
    tid = 1000 + rank if role == "main" else 2000 + rank
    return Thread(rank, "node", 1000 + rank, tid, role, role, where, reason, 1.0, 1, 0, 0, False)


def test_only_threads_that_are_elsewhere_are_reported() -> None:
    usual, odd = stack(MAIN, py("train", 20)), stack(MAIN, py("load", 5))
    threads = [thread(rank, odd if rank == 2 else usual) for rank in range(4)]
    threads += [thread(rank, stack(native("epoll_wait")), "watchdog") for rank in range(4)]
    first, second = compare(threads, [2])
    assert (first.role, first.differs, first.ranks, first.peers) == ("main", True, (2,), (0, 1, 3))
    assert first.frames[first.odd].function == "load"
    assert "rank 2 waits (futex) in load (app/train.py:5), called by <module> (app/train.py:90)" in first.text
    assert "of ranks 0,1,3 most wait (futex) in " in first.text
    assert not second.differs
    # A pool's threads are each in one of a few places: the same as some other rank's is no difference.
    pool = [thread(0, stack(native("a")), "pool"), thread(1, stack(native("b")), "pool")]
    assert not compare([*pool, thread(2, stack(native("b")), "pool")], [2])[0].differs
    # The same functions, another line.
    (place,) = compare([thread(0, stack(MAIN, py("f", 3))), thread(1, stack(MAIN, py("f", 4)))], [1])
    assert place.differs
    assert place.frames[place.odd].line == 4


# ---- from a store


def hung_job(store: Store, job: str, *, stacks: bool = False, alike: bool = False, ended: bool = False) -> None:
    """Eight ranks on two hosts; rank 6 stops after a while, and is traced for 30 s more. ``alike``: its threads are
    where the others' are; ``ended``: it has no process any more."""
    ranks = list(range(8))
    hosts = [f"node-{rank // 4}" for rank in ranks]
    with Writer(store, source="test") as writer:
        store_run(writer, ranks, job=job, steps=STEPS, step_ms=STEP_MS)
        writer.append("ranks", {
            "job": job, "run": 1, "rank": ranks, "host": hosts, "pid": [1000 + rank for rank in ranks],
            "local_rank": [rank % 4 for rank in ranks], "rank_source": "torchrun", "started": T0, "exe": "python",
            "command": "python train.py", "libraries": [[]] * 8, "probes": 0, "version": 2,
            "state": ["exited" if ended and rank == 6 else "traced" for rank in ranks],
        })  # fmt: skip
        writer.append("communicators", {
            "job": job, "run": 1, "rank": ranks, "comm": 5, "comm_group": 77, "comm_rank": ranks, "nranks": 8,
            "seq_offset": 0, "joined_by": "traffic", "error": "", "version": 1,
        })  # fmt: skip
        calls = [(rank, step) for rank in ranks for step in range(STEPS + (rank != 6))]
        writer.append("collectives", {
            "job": job, "run": 1, "rank": [rank for rank, _ in calls],
            "host": [hosts[rank] for rank, _ in calls], "pid": [1000 + rank for rank, _ in calls], "tid": 1, "comm": 5,
            "op": ["AllReduce" if step % 2 else "AllGather" for _, step in calls], "seq": [step for _, step in calls],
            "bytes": 4, "count": 1, "dtype": "float32", "redop": "sum", "peer": -1, "stream": 1,
            "ts": [T0 + (step * STEP_MS + 5) * MS for _, step in calls], "duration_ns": 1000, "result": 0,
            "in_group": False,
        })  # fmt: skip
        writer.append("coverage", {
            "job": job, "run": 1, "host": "node-0", "counter": ["hits"], "value": np.array([1], np.uint64),
            "loss": False, "ts": [T0 + (HUNG_MS + 30_000) * MS], "version": 1,
        })  # fmt: skip
        if stacks:
            usual = stack(MAIN, py("train", 20), native("cudaStreamSynchronize", "/usr/lib/libcudart.so.13"))
            odd = usual if alike else stack(MAIN, py("train", 31), py("read_shard", 7, "/app/data.py"), native("read"))
            store_stacks(writer, [
                Row(rank, odd if rank == 6 else usual, ms, "off", ns=2000 * MS, last_ms=ms + 2000,
                    reason="read" if rank == 6 and not alike else "driver")
                for rank in ranks for ms in range(HUNG_MS + 10_000, HUNG_MS + 30_000, 2000)
            ], job=job)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_store(tmp_path_factory.mktemp("hang"))


@pytest.fixture(scope="module")
def verdicts(url: str) -> dict[str, Verdict]:
    with open_store(url) as store:
        found = {}
        for job in ("sampled", "plain", "alike", "ended"):
            hung_job(store, job, stacks=job in ("sampled", "alike"), alike=job == "alike", ended=job == "ended")
            found[job] = verdict = diagnose_store(store, job, 1)
            jsonschema.validate(json.loads(json.dumps(verdict)), json_schema())
            for finding in verdict["findings"]:
                for evidence in finding["evidence"]:
                    assert len(next(iter(query_columns(store, evidence["sql"]).values()))), evidence["sql"]
        assert StackReader(store, "plain", 1).threads([6], T0, T0 + HUNG_MS * MS) == []
    return found


def test_a_hang_names_the_collective_the_rank_and_the_line(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["sampled"]
    assert verdict["status"] == "hung"
    (finding,) = verdict["findings"]
    assert (finding["ranks"], finding["hosts"], finding["level"]) == ([6], ["node-1"], "stack")
    assert finding["owner"] == "model"
    assert finding["collective"] == {
        "op": "AllGather", "comm_group": "77", "seq": STEPS, "came": [0, 1, 2, 3, 4, 5, 7], "missing": [6],
        "dimension": "",
    }  # fmt: skip
    text = " ".join(evidence["text"] for evidence in finding["evidence"])
    assert f"7 ranks called AllGather {STEPS} of their communicator of ranks 0-7; rank 6 did not come" in text
    assert (
        "the main thread of rank 6 waits (read) in read_shard (app/data.py:7), called by train (app/train.py:31)"
        in text
    )
    assert "of ranks 0-5,7 most wait (driver) in train (app/train.py:20)" in text
    assert "rank 6 on node-1 stays in read_shard (app/data.py:7): argus stacks --rank 6" in finding["action"]


def test_whose_a_hang_is(verdicts: dict[str, Verdict]) -> None:
    """A process that ended, and a GPU or network that does not go on, are none of the training code."""
    (ended,) = verdicts["ended"]["findings"]
    assert "rank 6 has no process any more" in [evidence["text"] for evidence in ended["evidence"]]
    (alike,) = verdicts["alike"]["findings"]
    assert "its threads are where those of the others are" in alike["action"]
    owners = {job: verdict["findings"][0]["owner"] for job, verdict in verdicts.items()}
    assert owners == {
        "sampled": "model", "plain": "model", "alike": "infrastructure", "ended": "infrastructure",
    }  # fmt: skip


@pytest.mark.usefixtures("verdicts")
def test_a_hang_that_is_older_than_what_is_asked_for(url: str) -> None:
    """Whoever asks for the last seconds of a job that has stopped before them asks why there is nothing."""
    with open_store(url) as store:
        stopped_ns, looked_ns = T0 + HUNG_MS * MS, T0 + (HUNG_MS + 30_000) * MS
        for since_ns in (stopped_ns - 2 * STEP_MS * MS, stopped_ns + 25_000 * MS, looked_ns):
            verdict = diagnose_store(store, "plain", 1, since_ns=since_ns)
            assert (verdict["status"], verdict["findings"][0]["ranks"]) == ("hung", [6])
        # Later nobody looked, and steps that somebody chose say nothing of later.
        later = diagnose_store(store, "plain", 1, since_ns=looked_ns + 1)
        assert (later["status"], later["reason"]) == ("inconclusive", "no whole training step was seen since then")
        chosen = diagnose_store(store, "plain", 1, since_ns=looked_ns, steps=(None, 20))
        assert chosen["status"] == "inconclusive"


def test_without_stacks_it_says_how_to_get_them(verdicts: dict[str, Verdict]) -> None:
    (finding,) = verdicts["plain"]["findings"]
    assert finding["level"] == "phase"
    assert "argus dump --pid 1006 on node-1" in finding["action"]


def test_places_without_peers_are_reported_alone() -> None:
    (place,) = compare([thread(0, stack(py("f", 3, "/a/b.py")))], [0])
    assert not place.differs
    assert place.text == "the main thread of rank 0 waits (futex) in f (a/b.py:3)"


def test_who_waits_for_a_transfer_is_a_victim() -> None:
    """Of four stages the third stopped: the second sent and waits to receive, the fourth waits to receive."""
    columns = {
        "comm_group": np.full(6, 9), "rank": np.array([10, 11, 11, 12, 12, 13]),
        "comm_rank": np.array([0, 1, 1, 2, 2, 3]), "peer": np.array([1, 0, 2, 1, 3, 2]),
        "sent": np.array([1, 0, 1, 0, 0, 0]), "received": np.array([1, 1, 1, 0, 0, 1]),
    }  # fmt: skip
    waits = stuck_transfers(columns)
    assert sorted((one.came, one.missing) for one in waits) == [((10,), (11,)), ((11,), (12,)), ((13,), (12,))]
    assert root_causes(waits) == ([12], False)
    # Whose calls match waits for nobody.
    columns["sent"], columns["received"] = np.ones(6), np.ones(6)
    assert stuck_transfers(columns) == []


def test_a_rank_whose_neighbour_in_the_pipeline_waits_is_a_victim() -> None:
    """Rank 3 is dead: 2 waits for it in tensor parallelism, 7 in the pipeline. Nobody sees what 6 waits for, but
    what it needs comes from 2."""
    pairs = {10: (2, 6), 11: (3, 7)}
    rows = [(group, rank, place, 1 - place) for group, ranks in pairs.items() for place, rank in enumerate(ranks)]
    columns = dict(zip(("comm_group", "rank", "comm_rank", "peer"), np.array(rows).T, strict=True))
    stuck = [Stuck(1, 5, (2,), (3,)), Stuck(2, 9, (0, 1), (2, 3, 6, 7)), Stuck(11, -1, (7,), (3,))]
    assert root_causes(stuck)[0] == [3, 6]
    assert not_downstream([3, 6], stuck, columns) == [3]
    # Where the neighbour waits for the rank itself, and where that would leave nobody, they stay.
    assert not_downstream([3], stuck, columns) == [3]
    assert not_downstream([6], stuck, columns) == [6]


def test_around_a_ring_of_stages_a_rank_is_no_victim_of_its_own() -> None:
    """An interleaved pipeline's last stage hands on to its first. Rank 3 is dead: 7 waits for it, 11 for 7, 15 for 11,
    and 15 is the neighbour of 3. Nobody sees what 6 waits for, but what it needs comes from 2, which waits for 3."""
    pairs = {10: (2, 6, 10, 14), 11: (3, 7, 11, 15)}
    rows = [
        (group, rank, place, (place + towards) % len(ranks))
        for group, ranks in pairs.items()
        for place, rank in enumerate(ranks)
        for towards in (-1, 1)
    ]
    columns = dict(zip(("comm_group", "rank", "comm_rank", "peer"), np.array(rows).T, strict=True))
    everybody = tuple(rank for ranks in pairs.values() for rank in ranks)
    waits = {2: 3, 7: 3, 11: 7, 15: 11, 10: 6, 14: 10}
    stuck = [Stuck(2, 9, (0, 1), everybody), *(Stuck(11, -1, (one,), (other,)) for one, other in waits.items())]
    assert root_causes(stuck)[0] == [3, 6]
    assert not_downstream([3, 6], stuck, columns) == [3]
