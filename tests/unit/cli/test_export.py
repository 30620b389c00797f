"""``argus export`` and ``argus stacks`` as a user runs them, on a store with a small job."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from argus.cli.main import main
from argus.cli.selection import parse_ranks, parse_span, parse_steps, parse_time
from argus.model.errors import ArgusError
from argus.store.open import open_store
from argus.store.writer import Writer
from tests.builders.stack_data import MS, Row, native, py, stack, store_run, store_stacks
from tests.stores import new_store

Run = Callable[..., tuple[int, str, str]]

COMPUTE = stack(py("main", 12), py("step", 40), native("cudaLaunchKernel", "/lib/libcudart.so.12"))
LOAD = stack(py("main", 12), py("step", 38), py("read_image", 55, "/app/data.py"))
BARRIER = stack(py("main", 12), py("step", 41), py("all_reduce", 7, "/app/dist.py"), native("pthread_cond_wait"))
SAVE = stack(py("main", 12), py("save", 90), native("write"))
DOG = stack(native("clone3"), native("watch"), python="none", native="complete")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four ranks, 20 steps of 100 ms: 60 ms of computing each; rank 2 loads for 30 ms more, all load from step 10 on.
    Then three ranks wait in a barrier for rank 2, which saves. A second job has other functions."""
    address = new_store(tmp_path_factory.mktemp("export"))
    with open_store(address) as store, Writer(store, source="test") as writer:
        store_run(writer, range(4), steps=20)
        rows = []
        for rank in range(4):
            for step in range(20):
                rows.append(Row(rank, COMPUTE, step * 100 + 5, count=6, last_ms=step * 100 + 60))
                if rank == 2 or step >= 10:
                    rows.append(Row(rank, LOAD, step * 100 + 65, count=3, last_ms=step * 100 + 95, gil=True))
            wait = SAVE if rank == 2 else BARRIER
            for piece in range(4):
                rows.append(Row(
                    rank, wait, 2000 + piece * 1000, kind="off", count=int(piece == 0), ns=1000 * MS,
                    last_ms=3000 + piece * 1000, reason="write" if rank == 2 else "futex",
                ))  # fmt: skip
            rows.append(Row(rank, DOG, 5400, count=1, tid=80 + rank, thread="argus-cupti"))  # of Argus itself
            rows.append(Row(rank, DOG, 5500, count=1, tid=90 + rank, thread=f"pt_nccl_{rank}"))
        store_stacks(writer, rows)
        store_run(writer, [0], job="other", run=5)
        store_stacks(writer, [Row(0, stack(py("elsewhere", 1)), 0, count=2)], job="other", run=5)
        store_run(writer, [0], job="empty", run=6)
        assert writer.flush(), writer.last_error
    return address


@pytest.fixture
def argus(url: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs ``argus`` in this process: (exit code, output, errors)."""
    monkeypatch.setenv("ARGUS_STORE", url)

    def run(*arguments: str) -> tuple[int, Any, str]:
        code = main([*arguments])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return code, out if arguments[1:2] == ("pprof",) else out.decode(), err.decode()

    return run


def folded(text: str) -> dict[str, int]:
    return {line.rpartition(" ")[0].rpartition(";")[2]: int(line.rpartition(" ")[2]) for line in text.splitlines()}


LLAMA = ("--job", "llama")


def test_folded(argus: Run) -> None:
    code, out, err = argus("export", "folded", *LLAMA, "--rank", "2")
    assert (code, err) == (0, "")
    assert folded(out) == {
        "cudaLaunchKernel (libcudart.so.12)": 1_200_000, "read_image (app/data.py)": 600_000,
        "watch (libc.so.6)": 10_000,
    }  # fmt: skip
    assert out.splitlines()[0].startswith("main (app/train.py);step (app/train.py);")
    assert "step (app/train.py:38);" in argus("export", "folded", *LLAMA, "--lines")[1]


def test_choices(argus: Run) -> None:
    def chosen(*arguments: str) -> dict[str, int]:
        code, out, err = argus("export", "folded", *LLAMA, *arguments)
        assert code == 0, err
        return folded(out)

    compute, load = "cudaLaunchKernel (libcudart.so.12)", "read_image (app/data.py)"
    assert chosen("--step", "3") == {compute: 240_000, load: 30_000}
    assert chosen("--step", "9-10", "--rank", "0,1", "--rank", "3") == {compute: 360_000, load: 90_000}
    assert chosen("--gil") == {load: 1_500_000}
    assert chosen("--thread", "pt_nccl_?") == {"watch (libc.so.6)": 40_000}
    assert chosen("--thread", "argus-cupti") == {"watch (libc.so.6)": 40_000}, "left out unless asked for"
    assert chosen("--kind", "off") == {"(waiting: futex)": 12_000_000, "(waiting: write)": 4_000_000}
    assert chosen("--last", "550ms") == {"watch (libc.so.6)": 40_000}
    assert chosen("--from", "1700000000", "--to", "2023-11-14T22:13:20.1Z", "--thread", "main") == {
        compute: 240_000, load: 30_000,
    }  # fmt: skip
    assert folded(argus("export", "folded", "--job", "other")[1]) == {"elsewhere (app/train.py)": 20_000}


def test_a_flame_graph_in_a_file(argus: Run, tmp_path: Path) -> None:
    file = tmp_path / "flame.svg"
    code, out, err = argus("export", "svg", *LLAMA, "--rank", "2", "-o", str(file))
    assert (code, err) == (0, "")
    assert out == f"{file}: llama, run 1, rank 2, on the CPU; 181 samples, 1,810 ms\n"
    shown = "".join(ElementTree.parse(file).getroot().itertext())
    assert "run 1, rank 2, on the CPU" in shown
    assert "read_image (app/data.py)" in shown
    assert list(tmp_path.iterdir()) == [file]


def test_speedscope_and_pprof(argus: Run, tmp_path: Path) -> None:
    code, out, _ = argus("export", "speedscope", *LLAMA)
    assert code == 0
    names = [one["name"] for one in json.loads(out)["profiles"]]
    assert names == [
        name for r in range(4) for name in (f"rank {r} pt_nccl_{r} ({90 + r})", f"rank {r} python ({1000 + r})")
    ]
    code, data, _ = argus("export", "pprof", *LLAMA)
    assert code == 0
    assert b"cudaLaunchKernel" in gzip.decompress(data)
    file = tmp_path / "job.pb.gz"
    assert argus("export", "pprof", *LLAMA, "-o", str(file))[0] == 0
    assert file.read_bytes() == data


def test_what_one_rank_does_more_of(argus: Run, tmp_path: Path) -> None:
    code, out, err = argus("export", "folded", *LLAMA, "--rank", "2", "--step", "0-9", "--diff", "rank=others")
    assert code == 0
    values = {line.split(";")[-1].rpartition(" ")[0]: line for line in out.splitlines()}
    assert values["read_image (app/data.py) 0"].endswith(" 0 30000000")  # per step and rank
    assert values["cudaLaunchKernel (libcudart.so.12) 60000000"].endswith(" 60000000 60000000")
    assert err.splitlines() == [
        "time per step and rank, by Python function: before, after, change",
        "  more       0 ns    30.0 ms    +30.0 ms  read_image (app/data.py)",
    ]
    file = tmp_path / "diff.svg"
    code, out, err = argus("export", "svg", *LLAMA, "--rank", "2", "--diff", "rank=0", "-o", str(file))
    assert (code, err) == (0, "")
    assert "+15.0 ms  read_image" in out
    shown = "".join(ElementTree.parse(file).getroot().itertext())
    assert "compared with: run 1, rank 0, on the CPU" in shown


def test_what_became_slower(argus: Run) -> None:
    arguments = ("export", "folded", *LLAMA, "--rank", "0", "--thread", "main", "--step", "10-19", "--diff", "step=0-9")
    assert "  more       0 ns    30.0 ms    +30.0 ms  read_image (app/data.py)" in argus(*arguments)[2]
    back = ("export", "folded", *LLAMA, "--rank", "0", "--step", "0-9", "--diff", "step=10-19", "--per", "second")
    assert "  less     300 ms       0 ns     -300 ms  read_image (app/data.py)" in argus(*back)[2]
    same = argus("export", "folded", *LLAMA, "--rank", "0", "--step", "0-4", "--diff", "step=5-9")
    assert same[2].splitlines()[1:] == ["  no difference"]
    jobs = argus("export", "folded", *LLAMA, "--rank", "0", "--diff", "job=other", "--per", "total")
    assert "less   1,000 ms       0 ns   -1,000 ms  elsewhere (app/train.py)" in jobs[2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["folded", "--job", "llama", "--rank", "9"], 3, "no stacks of job 'llama' found: run 1, rank 9, on the CPU"),
        (["svg", "--job", "llama", "--step", "77-99"], 3, "ranks 0-3 from 2023-11-14 22:13:20.005 UTC"),
        (["svg", "--job", "llama", "--diff", "rank=7", "--rank", "1"], 3, "rank 7"),
        (["svg", "--job", "empty"], 3, "no stacks at all"),
        (["svg", "--job", "empty", "--last", "1s"], 3, "no stacks at all"),
        (["svg", "--job", "nobody"], 3, "no job 'nobody'"),
        (["svg", "--job", "llama", "--run", "9"], 3, "job 'llama' has no run 9"),
        (["svg", "--rank", "x"], 2, "'x' names no ranks"),
        (["svg", "--rank", "5-3"], 2, "'5-3' names no ranks"),
        (["svg", "--step", "a"], 2, "'a' names no steps"),
        (["svg", "--last", "soon"], 2, "'soon' is no span of time"),
        (["svg", "--from", "noon"], 2, "'noon' is not a time"),
        (["svg", "--last", "1s", "--step", "1"], 2, "--last cannot be combined with --since"),
        (["svg", "--from", "1700000000", "--step", "1"], 2, "--steps cannot be combined"),
        (["svg", "--job", "llama", "--diff", "rank=others"], 2, "needs --rank"),
        (["svg", "--job", "llama", "--diff", "colour=red"], 2, "does not name what to compare with"),
        (["svg", "--job", "llama", "--diff", "step="], 2, "does not name what to compare with"),
        (["svg", "--job", "llama", "--rank", "1", "--diff", "rank=1"], 2, "with itself"),
        (["svg", "--per", "step"], 2, "no --diff"),
        (["pprof", "--diff", "rank=1"], 2, "pprof does not support --diff"),
        (["folded", "--job", "llama", "-o", "/nowhere/x"], 1, "/nowhere/x cannot be written"),
        (["flamegraph"], 2, "'flamegraph' is not one of"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_clear_line(argus: Run, arguments: list[str], code: int, words: str) -> None:
    found, out, err = argus("export", *arguments)
    assert (found, out) == (code, b"" if arguments[0] == "pprof" else ""), err
    assert words in err
    assert "Traceback" not in err
    assert "internal error" not in err


def test_a_store_without_stacks(argus: Run, tmp_path: Path) -> None:
    code, _, err = argus("export", "svg", "--store", f"chdb://{tmp_path}/none")
    assert code == 3
    assert "nothing is stored yet" in err


def test_words_of_the_command_line() -> None:
    assert parse_ranks(("0-2,7", "3")) == (0, 1, 2, 3, 7)
    assert parse_ranks(()) == ()
    assert parse_steps("4:9") == parse_steps("4-9") == (4, 9)
    assert (parse_span("500ms"), parse_span("2m"), parse_span("1.5")) == (500 * MS, 120_000 * MS, 1500 * MS)
    at = 1_700_000_000_123_456_789
    assert parse_time("1700000000.123456789") == at
    assert parse_time("2023-11-14T22:13:20.123456789") == at
    assert parse_time("2023-11-14 23:13:20.123456789+01:00") == at
    assert parse_time("2023-11-14") == 1_699_920_000_000_000_000
    for word in ("0s", "-1s", "1 year"):
        with pytest.raises(ArgusError):
            parse_span(word)


# ---- argus stacks


def test_the_rank_that_the_others_wait_for_is_named(argus: Run) -> None:
    code, out, err = argus("stacks", *LLAMA)
    assert (code, err) == (0, "")
    assert out == (
        "llama: run 1, 2,000 ms up to 2023-11-14 22:13:26.000 UTC\n"
        "4 ranks (0-3), 8 threads\n"
        "\n"
        "main threads\n"
        "  ranks 0,1,3 (3 ranks): waiting: futex\n"
        "    pthread_cond_wait (libc.so.6)\n"
        "    all_reduce (app/dist.py:7)\n"
        "    step (app/train.py:41)\n"
        "    main (app/train.py:12)\n"
        "  rank 2 (1 rank): waiting: write   <-- elsewhere\n"
        "    rank 2: node-0, process 1002, thread 1002\n"
        "    write (libc.so.6)\n"
        "    save (app/train.py:90)\n"
        "    main (app/train.py:12)\n"
        "\n"
        "threads pt_nccl_#\n"
        "  ranks 0-3 (4 ranks): running\n"
        "    watch (libc.so.6)\n"
        "    clone3 (libc.so.6)\n"
    )


def test_stacks_at_a_time_and_of_a_step(argus: Run) -> None:
    step = argus("stacks", *LLAMA, "--step", "3")[1]
    assert "  ranks 0-3 (4 ranks): running\n    cudaLaunchKernel (libcudart.so.12)\n" in step
    assert step.startswith("llama: run 1, all ranks, step 3")
    at = argus("stacks", *LLAMA, "--at", "1700000003.5", "--thread", "main", "--rank", "0-2")[1]
    assert "3 ranks (0-2), 3 threads" in at
    assert "rank 2 (1 rank): waiting: write" in at
    few = argus("stacks", *LLAMA, "--frames", "1")[1]
    assert "    pthread_cond_wait (libc.so.6)\n    ... 3 more (--frames)\n" in few


def test_stacks_as_json(argus: Run) -> None:
    code, out, _ = argus("stacks", *LLAMA, "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert (found["job"], found["ranks"], [role["role"] for role in found["roles"]]) == (
        "llama", [0, 1, 2, 3], ["main", "pt_nccl_#"],
    )  # fmt: skip
    usual, odd = found["roles"][0]["groups"]
    assert (usual["ranks_text"], usual["odd"], odd["ranks"], odd["odd"]) == ("0,1,3", False, [2], True)
    assert odd["frames"][1] == {"kind": "python", "function": "save", "file": "/app/train.py", "line": 90}
    assert odd["common_with_first"] == 1
    (thread,) = odd["threads"]  # the newest moment is in the window, so that it begins 1 ns later
    assert (thread["reason"], thread["off_cpu_ns"], thread["silent_ns"]) == ("write", 2000 * MS - 1, 0)
    assert thread["stack_id"] == str(SAVE.id)


def test_a_rank_that_is_silent_is_not_left_out(argus: Run) -> None:
    """Where they were is older than the window, and that is reported."""
    out = argus("stacks", *LLAMA, "--from", "1700000005.55", "--to", "1700000005.6")[1]
    # The wait was recorded until 6 s.
    assert "waiting: futex\n" in out
    assert "last seen" not in out
    out = argus("stacks", *LLAMA, "--from", "1700000006", "--to", "1700000006.5")
    assert out[0] == 0
    assert "ranks 0,1,3 (3 ranks): waiting: futex, 3 last seen 500 ms ago or earlier" in out[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--job", "llama", "--rank", "9"], 3, "no stacks of job 'llama' found"),
        (["--job", "llama", "--at", "1600000000"], 3, "It has samples of ranks 0-3"),
        (["--job", "empty"], 3, "no stacks at all"),
        (["--at", "1600000000", "--last", "1s"], 2, "--at cannot be combined"),
    ],
)
def test_stacks_that_are_not_there(argus: Run, arguments: list[str], code: int, words: str) -> None:
    found, out, err = argus("stacks", *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert re.match(r"argus: .*\n( {7}.*\n)?\Z", err)


def test_the_help_names_every_format(argus: Run) -> None:
    output = argus("export", "--help")[1]
    assert all(word in output for word in ("svg", "folded", "speedscope", "pprof", "--diff"))
