"""Reports of NCCL's RAS and logs of its Inspector: what is stored, who is named, what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from argus.cli.import_trace import command
from argus.cli.main import main
from argus.importers.dumps import inspector, ras
from argus.model.errors import ArgusError
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.unit.importers.dumps.test_flight_recorder import CASES, broken


def report(counts: Sequence[int], *, second: int = 0, gone: Sequence[int] = (), dead: bool = True) -> dict[str, Any]:
    """One communicator whose ranks called so many collectives; ``gone`` do not answer."""

    def about(rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "host": f"10.0.0.{rank // 2}",
            "pid": 100 + rank,
            "cuda_dev": rank % 2,
            "nvml_dev": rank % 2,
        }

    ranks = [
        {**about(rank), "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
         "collective_counts": {"Broadcast": 3, "AllReduce": count, "Send": 7 * rank}}
        for rank, count in enumerate(counts) if rank not in gone
    ]  # fmt: skip
    missing = [{**about(rank), "status": {"unresponsive": True, "considered_dead": dead}} for rank in gone]
    return {
        "nccl_version": "2.29.1", "cuda_driver_version": 13000, "timestamp": f"2026-01-02 03:04:{second:02}",
        "communicators_count": 1, "communicators": [{
            "hash": "0xabc", "secondary_hash": "0x1:0x2", "size": len(counts), "ranks_count": len(ranks),
            "missing_ranks_count": len(missing), "ranks": ranks, "missing_ranks": missing,
        }], "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
    }  # fmt: skip


def line(rank: int, seq: int, took_us: int, *, size: int = 4) -> dict[str, Any]:
    return {
        "header": {"id": "0x7f8c", "rank": rank, "n_ranks": size, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "git_rev": "", "rec_mechanism": "profiler_plugin",
                     "dump_timestamp_us": 1_748_030_377_748_202 + seq * 1000, "hostname": f"node{rank // 2}",
                     "pid": 100 + rank},
        "coll_perf": {"coll": "AllReduce", "coll_sn": seq, "coll_msg_size_bytes": 1 << 20, "coll_exec_time_us": took_us,
                      "coll_algobw_gbs": 277.2, "coll_busbw_gbs": 485.1},
    }  # fmt: skip


def inspect(path: Path, rank: int, took_us: int = 900) -> Path:
    path.write_text("".join(json.dumps(line(rank, seq, took_us)) + "\n" for seq in range(1, 21)))
    return path


def judged(url: str, job: str, paths: Sequence[Path], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["import", "ras", *map(str, paths), "--job", job, "--store", url]) == 0
    capsys.readouterr()
    main(["diagnose", "--job", job, "--format", "json", "--store", url])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def reports(folder: Path, *each: dict[str, Any]) -> list[Path]:
    for number, one in enumerate(each):
        (folder / f"{number}.json").write_text(json.dumps(one))
    return sorted(folder.glob("*.json"))


def test_a_rank_that_stays_behind_is_named(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = judged(url, "behind", reports(tmp_path, report([9, 9, 8, 9]), report([9, 9, 8, 9], second=10)), capsys)
    (finding,) = found["findings"]
    assert (found["status"], finding["ranks"], finding["hosts"]) == ("hung", [2], ["10.0.0.1"])
    text = finding["evidence"][0]["text"]
    assert "ranks 0, 1, 3 wait in AllReduce 12 of communicator 0xabc of ranks 0-3; rank 2 did not call it" in text


def test_one_report_or_counts_that_move_are_no_hang(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for job, paths in (
        ("single", reports(tmp_path / "one", report([9, 9, 8, 9]))),
        ("moving", reports(tmp_path / "two", report([8, 8, 8, 8]), report([9, 9, 8, 9], second=10))),
    ):
        found = judged(url, job, paths, capsys)
        assert (found["status"], found["findings"]) == ("inconclusive", [])
        assert "that is not a hang yet" in found["reason"]


def test_a_rank_that_makes_calls_elsewhere_is_not_hung(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 is one call behind in the world, and its own pair goes on from report to report."""
    first, second = report([9, 9, 8, 9]), report([9, 9, 8, 9], second=40)
    for each, calls in ((first, 30), (second, 90)):
        pair = report([calls, calls])["communicators"][0]
        pair["hash"] = "0xdef"
        for member, place in zip(pair["ranks"], (2, 3), strict=True):
            of = each["communicators"][0]["ranks"][place]
            member.update({name: of[name] for name in of if name not in ("rank", "collective_counts")})
        each["communicators"].append(pair)
    found = judged(url, "elsewhere", reports(tmp_path, first, second), capsys)
    assert (found["status"], found["findings"]) == ("inconclusive", []), found


@pytest.mark.parametrize("dead", [True, False])
def test_a_rank_that_does_not_answer_is_named(
    dead: bool, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = judged(url, f"gone{dead}", reports(tmp_path, report([9, 9, 9, 9], gone=[1], dead=dead)), capsys)
    (finding,) = found["findings"]
    assert (found["status"], finding["ranks"], finding["owner"]) == ("hung", [1], "infrastructure")
    silence = "rank 1 (10.0.0.0, pid 101) does not answer" + (" and is considered dead" if dead else "")
    assert found["reason"] == f"RAS: {silence}"
    assert finding["evidence"][0]["text"].endswith(f"; RAS: {silence}")
    assert "rank 1 (10.0.0.0, pid 101)" in finding["action"]
    assert "dump" not in finding["action"].replace("argus dump", "")
    assert finding["confidence"] == 0.9


def test_the_missing_comma_and_what_is_no_report(tmp_path: Path) -> None:
    text = json.dumps(report([9, 9], gone=[1]), indent=2)
    broken = text.replace('"cuda_dev": 1,\n', '"cuda_dev": 1\n')
    assert broken != text
    path = tmp_path / "r.json"
    path.write_text("SERVER PROTOCOL 2\nOK\n" + broken)
    (members,) = ras.read(path).communicators.values()
    assert {rank: member.state for rank, member in members.items()} == {0: "dumped", 1: "dead"}
    for wrong in ("", "{}", "[]", '{"communicators": [1]}', '{"communicators": [{"ranks": [{}]}]}', "{" * 100_000):
        path.write_text(wrong)
        with pytest.raises(ArgusError, match="not a report of NCCL's RAS") as refused:
            ras.read(path)
        assert "\n" not in refused.value.message


def test_inspector_logs_are_stored(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        inspect(tmp_path / f"node-pid{100 + rank}.log", rank, took_us=300 if rank == 2 else 900)
    assert main(["import", "inspector", str(tmp_path), "--job", "inspected", "--store", url]) == 0
    assert "80 collectives of 1 communicator" in capsys.readouterr().out
    with open_store(url) as store:
        found = query_columns(
            store, "SELECT rank, count() AS n, avg(waited_ns) AS waited FROM collective_waits WHERE job = 'inspected' "
            "GROUP BY rank ORDER BY rank"
        )  # fmt: skip
        hosts = query_columns(store, "SELECT host FROM ranks FINAL WHERE job = 'inspected' ORDER BY rank")
    assert found["n"].tolist() == [20] * 4
    # The rank that waits least came last.
    assert found["waited"].tolist() == [600_000, 600_000, 0, 600_000]
    assert hosts["host"].tolist() == ["node0", "node0", "node1", "node1"]
    main(["diagnose", "--job", "inspected", "--format", "json", "--store", url])
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "inconclusive"
    assert found["reason"] == (
        "no whole training step was seen; rank 2 waits least in 20 of 20 logged collectives (300 µs, the others "
        "900 µs): it comes last to them"
    )


def test_a_log_that_is_given_twice_counts_once(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        inspect(tmp_path / f"node-pid{100 + rank}.log", rank)
    (tmp_path / "copy.log").write_bytes((tmp_path / "node-pid101.log").read_bytes())
    assert main(["import", "inspector", str(tmp_path), "--job", "twice", "--store", url]) == 0
    shown = capsys.readouterr().out
    assert "80 collectives of 1 communicator" in shown
    assert "collectives repeated 20" in shown
    with open_store(url) as store:
        sql = "SELECT count() AS n FROM collectives WHERE job = 'twice'"
        assert query_columns(store, sql)["n"].tolist() == [80]
    # All are in them for as long.
    main(["diagnose", "--job", "twice", "--format", "json", "--store", url])
    assert json.loads(capsys.readouterr().out)["reason"] == "no whole training step was seen"


@pytest.mark.parametrize("verb", sorted(command.commands))
def test_help_shows_one_command_a_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Examples are lines that can be copied, and nothing in it is a control character."""
    assert main(["import", verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\b" not in shown
    assert "\\u0008" not in shown
    lines = shown.splitlines()
    assert any(line.startswith(f"    argus import {verb} ") for line in lines)
    assert not [line for line in lines if line.count("argus ") > 1 and "&&" not in line]


def test_a_log_that_is_cut_off_and_one_of_another_kind(tmp_path: Path) -> None:
    path = inspect(tmp_path / "a.log", 0)
    path.write_bytes(path.read_bytes()[:-40])
    log = inspector.read_all([path])
    assert (len(log.columns["seq"]), log.losses["lines_unreadable"]) == (19, 1)
    for wrong in ("", "hello\nworld\n", "{}\n{}\n", "[1]\n" * 5, json.dumps(line(7, 1, 1)) + "\n" + "x\n" * 3):
        path.write_text(wrong)
        with pytest.raises(ArgusError) as refused:
            inspector.read_all([path])
        assert "\n" not in refused.value.message


@pytest.mark.parametrize("year", ["2825", "0001"])
def test_a_time_that_no_table_takes_is_the_file_s(year: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(report([9, 9, 8]) | {"timestamp": f"{year}-01-02 03:04:05"}))
    assert ras.read(path).at_ns == path.stat().st_mtime_ns


@pytest.mark.parametrize("kind", ["ras", "inspector"])
def test_broken_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    path, rng, read, lines = tmp_path / "f.json", random.Random(3), 0, set[int]()
    whole = (
        json.dumps(report([9, 9, 8], gone=[1]), indent=1).encode() if kind == "ras" else inspect(path, 1).read_bytes()
    )
    for _ in range(CASES):
        path.write_bytes(broken(whole, rng))
        try:
            if kind == "ras":
                found = ras.read(path)
                list(ras._tables([found], ras._ranks(found)))
            else:
                inspector.read_all([path])
        except ArgusError as error:
            lines.add(error.message.count("\n"))
            continue
        read += 1
    assert read > CASES / 100
    assert lines == {0}
