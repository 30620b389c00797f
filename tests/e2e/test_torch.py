"""Stacks of real PyTorch jobs on CPUs: DistributedDataParallel over gloo, data-loader workers, garbage collections."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from argus.capture.process.targets import descendants
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import ARGUS, Argus, argus_with, pid_words, start_trace
from tests.kernel.conftest import wait_until
from tests.ports import free_port
from tests.stores import new_store

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="pip install torch (ARGUS_WITH_TORCH=1)"),
]

PROGRAM = Path(__file__).with_name("torch_train.py")
CALLED_BY_OTHERS = ("read_batches", "Net.forward", "Log.collection", "Numbers.__getitem__", "Net.__init__")
"""A generator, and what C code and PyTorch call."""
SLOW_MS = 40
KNOWN = 0.9
"""Part of the waits that must have a stack: a place where no wait was long before may be passed over."""
STEPS = 40
"""How many steps of each rank are traced."""
OFTEN = ("--rate", "97", "--max-overhead", "10")
"""So many samples cost 0.7 % of this job, and more beside other load: at the default budget there may be fewer."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Row:
    """A row of stack_samples with the frames of its stack: (kind, function, file, line), root first."""

    rank: int
    pid: int
    tid: int
    thread: str
    kind: str
    reason: str
    gc: bool
    count: int
    ns: int
    runqueue_ns: int
    max_ns: int
    begin_ns: int
    end_ns: int
    python: str
    frames: tuple[tuple[str, str, str, int], ...]

    @property
    def functions(self) -> list[str]:
        return [function for _, function, _, _ in self.frames]

    @property
    def ending(self) -> bool:
        """Nothing could be read: the thread was about to end, its memory gone."""
        return self.python == "rejected" and len(self.frames) == 1

    @property
    def main(self) -> bool:
        return self.pid == self.tid


@dataclass
class Traced:
    """A job that was traced, what Argus printed, and what the program wrote itself."""

    url: str
    output: str = ""
    pids: list[int] = field(default_factory=list)
    workers: dict[int, int] = field(default_factory=dict)
    truth: list[list[dict[str, int]]] = field(default_factory=list)
    dumped: str = ""
    _rows: list[Row] = field(default_factory=list)

    def query(self, sql: str) -> list[dict[str, object]]:
        with open_store(self.url, create=False) as store:
            columns = query_columns(store, sql)
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*(c.tolist() for c in columns.values()), strict=True)
        ]

    def rows(self) -> list[Row]:
        if not self._rows:
            found = self.query(
                "SELECT rank, pid, tid, toString(thread) AS thread, toString(kind) AS kind, toString(reason) AS reason,"
                " gc, count, ns, runqueue_ns, max_ns, toUnixTimestamp64Nano(ts) - j.offset AS begin_ns,"
                " toUnixTimestamp64Nano(last_ts) - j.offset AS end_ns, toString(k.python) AS python,"
                " kinds, functions, files, lines"
                " FROM stack_samples AS s LEFT ANY JOIN stacks AS k ON s.run = k.run AND s.stack_id = k.stack_id"
                " CROSS JOIN (SELECT any(mono_offset_ns) AS offset FROM jobs FINAL) AS j"
            )
            parts = ("kinds", "functions", "files", "lines")
            for row in found:
                row["frames"] = tuple(zip(*(row.pop(name) for name in parts), strict=True))  # type: ignore[call-overload]
            self._rows = [Row(**row) for row in found]  # type: ignore[arg-type]
        return self._rows

    def main_rows(self, rank: int, kind: str) -> list[Row]:
        """Of the main thread of the rank's own process."""
        return [row for row in self.rows() if row.tid == self.pids[rank] and row.kind == kind]

    def window(self, rank: int) -> tuple[int, int]:
        """The time that was traced, CLOCK_MONOTONIC."""
        own = [row for row in self.rows() if row.pid == self.pids[rank]]
        return min(row.begin_ns for row in own), max(row.end_ns for row in own)

    def steps(self, rank: int) -> list[dict[str, int]]:
        begin, end = self.window(rank)
        return [
            line for line in self.truth[rank] if "step" in line and begin <= line["start_ns"] and line["end_ns"] <= end
        ]


def read_truth(folder: Path, rank: int) -> list[dict[str, int]]:
    """Whole lines only: the job may be writing."""
    file = folder / f"truth-{rank}"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_done(folder: Path) -> int:
    return min(sum("step" in line for line in read_truth(folder, rank)) for rank in (0, 1))


def wait_for_steps(folder: Path, count: int) -> None:
    before = steps_done(folder)
    wait_until(lambda: steps_done(folder) >= before + count, 120, f"{count} steps of the PyTorch job")


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def torch_words(folder: Path, *words: str) -> list[str]:
    return [str(PROGRAM), "--truth", f"{folder}/truth-{{rank}}", "--slow-rank", "1", "--slow-ms", str(SLOW_MS), *words]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Two ranks as plain processes, the second slow in its main thread, traced by --pid while they run."""
    folder = tmp_path_factory.mktemp("plain")
    traced = Traced(new_store(folder))
    port = free_port()
    job = [
        subprocess.Popen(
            [sys.executable, *torch_words(folder)],
            env={
                **ENVIRONMENT, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        wait_for_steps(folder, 3)
        traced.pids = [process.pid for process in job]
        traced.workers = {worker: rank for rank in (0, 1) for worker in descendants([traced.pids[rank]])}
        tracing = start_trace(traced.url, *pid_words(traced.pids), *OFTEN)
        try:
            assert tracing.stdout is not None
            while (first := tracing.stdout.readline()).startswith("argus: "):
                pass  # what takes time
            wait_for_steps(folder, STEPS)
            dump = [*ARGUS, "dump", *pid_words(traced.pids), "--format", "json"]
            dumped = subprocess.run(dump, capture_output=True, text=True, timeout=90, check=False)
            traced.dumped = dumped.stdout or dumped.stderr
            tracing.send_signal(signal.SIGINT)
            rest, _ = tracing.communicate(timeout=90)
        finally:
            end(tracing)
        traced.output = first + rest
        assert tracing.returncode == 0, traced.output
        assert [process.poll() for process in job] == [None, None], "tracing ended the job"
        traced.truth = [read_truth(folder, rank) for rank in (0, 1)]
    finally:
        for process in job:
            end(process)
    return traced


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """The same by torchrun, the second rank slow in its workers, followed from the launcher on to the job's end."""
    folder = tmp_path_factory.mktemp("torchrun")
    traced = Traced(new_store(folder))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.Popen(
        [*torchrun, *torch_words(folder, "--slow-where", "worker", "--until", str(folder / "enough"))],
        env=ENVIRONMENT,
        text=True,
    )
    try:
        wait_until(lambda: len(descendants([job.pid])) >= 2, 60, "torchrun to start its ranks")
        with open(folder / "output", "w", encoding="utf-8") as output:
            words = [*ARGUS, "trace", "--pid", str(job.pid), "--children", *OFTEN, "--store", traced.url]
            tracing = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            wait_for_steps(folder, 3)
            traced.pids = [next(line["pid"] for line in read_truth(folder, rank)) for rank in (0, 1)]
            traced.workers = {worker: rank for rank in (0, 1) for worker in descendants([traced.pids[rank]])}
            known = len(traced.pids) + len(traced.workers)
            wait_until(
                lambda: (folder / "output").read_text().count("note: following process") >= known,
                60,
                "all to be followed",
            )
            wait_for_steps(folder, STEPS)
            (folder / "enough").touch()
            assert job.wait(90) == 0
            tracing.wait(90)
        finally:
            end(tracing)
        traced.output = (folder / "output").read_text()
        assert tracing.returncode == 0, traced.output
        traced.truth = [read_truth(folder, rank) for rank in (0, 1)]
    finally:
        job.terminate()  # torchrun ends its ranks
        job.wait()
    return traced


@pytest.fixture(params=["plain", "launched"])
def traced(request: pytest.FixtureRequest) -> Traced:
    """Either of them."""
    found: Traced = request.getfixturevalue(request.param)
    return found


# ---- what must hold of either


def test_nothing_is_lost(traced: Traced) -> None:
    assert "coverage: complete" in traced.output
    rows = [row for row in traced.rows() if row.frames and not row.ending and "gloo" not in row.thread]
    with_python = [row for row in rows if row.python != "none"]
    taken = sum(row.count for row in with_python)
    assert taken > 300, traced.output
    bad = [row for row in with_python if row.python == "rejected" or "(unresolved)" in row.functions]
    assert sum(row.count for row in bad) <= 0.005 * taken, bad


def test_frames_are_hardly_ever_rejected(plain: Traced) -> None:
    found = plain.query("SELECT toString(counter) AS counter, value FROM coverage FINAL")
    counters = {str(row["counter"]): int(str(row["value"])) for row in found}
    names = ("stack_python_rejected", "stack_python_fault", "python_frames_unresolved")
    assert sum(counters.get(name, 0) for name in names) <= 0.005 * counters["stack_python"], counters


def test_every_process_has_its_rank_and_threads_their_names(traced: Traced) -> None:
    assert {row.pid for row in traced.rows()} == {*traced.pids, *traced.workers}, traced.output
    ranks = {pid: rank for rank, pid in enumerate(traced.pids)} | traced.workers
    assert {(row.pid, row.rank) for row in traced.rows()} == set(ranks.items())
    for rank in (0, 1):
        names = {row.thread for row in traced.rows() if row.pid == traced.pids[rank]}
        assert {"stager", "pt_gloo_runloop", "gloo_tcp_loop"} <= names
    assert {row.thread for row in traced.rows() if row.pid in traced.workers} >= {"pt_data_worker"}


def test_the_phases_of_a_step_are_in_the_main_threads(traced: Traced) -> None:
    for rank in (0, 1):
        rows = traced.main_rows(rank, "cpu")
        seen = Counter(function for row in rows for function in dict.fromkeys(row.functions))
        for function in ("train_step", "Net.forward", "DistributedDataParallel.forward", "Tensor.backward",
                         "_engine_run_backward", "Adam.step", "clean_up"):  # fmt: skip
            assert seen[function], (rank, function, seen.most_common(60))
        either = traced.main_rows(rank, "off") + rows
        assert any("_BaseDataLoaderIter.__next__" in row.functions for row in either)
        # Compiled code below them: where autograd's engine computes, and the optimizer.
        leaves = {
            row.frames[-1][2].rpartition("/")[2]
            for row in rows
            if "_engine_run_backward" in row.functions and row.frames[-1][0] == "native"
        }
        assert any(leaf.startswith("libtorch") for leaf in leaves), leaves
    assert not any(
        {"Tensor.backward", "Adam.step", "Net.forward"} & set(row.functions) for row in traced.rows() if not row.main
    )


def test_workers_are_seen_at_their_work(traced: Traced) -> None:
    for worker in traced.workers:
        own = [row for row in traced.rows() if row.tid == worker and row.frames]
        assert any("_worker_loop" in row.functions for row in own)
    for rank in (0, 1):
        own = [row for row in traced.rows() if traced.workers.get(row.tid) == rank]
        assert any("Numbers.decode" in row.functions for row in own)
        stack = next(row.functions for row in own if "Numbers.decode" in row.functions)
        order = [
            "<module>", "main", "read_batches", "DataLoader.__iter__", "_worker_loop", "_MapDatasetFetcher.fetch",
            "Numbers.__getitem__", "Numbers.decode",
        ]  # fmt: skip
        places = [stack.index(function) for function in order]
        assert places == sorted(places)
    outside = [row for row in traced.rows() if row.pid not in traced.workers]
    assert not any({"_worker_loop", "Numbers.decode"} & set(row.functions) for row in outside)


def test_threads_of_compiled_code_have_no_python(traced: Traced) -> None:
    gloo = [row for row in traced.rows() if row.thread in ("pt_gloo_runloop", "gloo_tcp_loop")]
    gloo = [row for row in gloo if row.frames and not row.ending]
    assert {kind for row in gloo for kind, *_ in row.frames} <= {"native", "marker"}
    # Its callbacks may take the GIL: then it has a thread state for a moment, which may be gone when it is looked at.
    none = sum(row.count for row in gloo if row.python == "none")
    assert none >= 0.8 * sum(row.count for row in gloo)


def functions_of(file: Path) -> dict[str, set[int]]:
    """Qualified name → the lines that are its own. Comprehensions are functions before CPython 3.12."""
    names: dict[type[ast.AST], str] = {ast.ListComp: "<listcomp>", ast.GeneratorExp: "<genexpr>"}
    found: defaultdict[str, set[int]] = defaultdict(set)

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            name = child.name if isinstance(child, ast.FunctionDef) else names.get(type(child))
            if name is not None:
                found[prefix + name].update(range(child.lineno, child.end_lineno + 1))  # type: ignore[attr-defined]
                inner = f"{prefix}{name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inner = f"{prefix}{child.name}."
            walk(child, inner)

    walk(ast.parse(file.read_text()), "")
    return found


def test_every_frame_of_the_program_can_be_true(traced: Traced) -> None:
    """Each line lies in its function, and calls the frame that follows."""
    lines = functions_of(PROGRAM)
    source = PROGRAM.read_text().splitlines()
    checked = 0
    for frames in {row.frames for row in traced.rows()}:
        for place, (kind, function, file, line) in enumerate(frames):
            if file != str(PROGRAM):
                continue
            assert kind == "python"
            if function == "<module>":
                assert place == 0
            else:
                assert line in lines[function], (function, line)
            callee = frames[place + 1] if place + 1 < len(frames) else None
            if callee is None or callee[2] != str(PROGRAM) or callee[1] in CALLED_BY_OTHERS:
                continue
            name = callee[1].rpartition(".")[2]
            if name == "<listcomp>":
                assert f"{function}.<locals>.{name}" == callee[1]
                assert line in lines[callee[1]], (function, line, callee)
            else:
                assert f"{name}(" in source[line - 1], (function, line, callee)
                checked += 1
    assert checked > 20


# ---- what the plain job shows


def slow_line(text: str) -> int:
    return next(n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line)


def test_the_sleeping_rank_is_seen_in_its_line(plain: Traced) -> None:
    line = slow_line("# a slow network")
    off = [row for row in plain.main_rows(1, "off") if row.reason == "sleep"]
    known = [row for row in off if row.frames]
    assert known
    assert {row.functions[-2:] == ["wait_for_data", "clock_nanosleep"] for row in known} == {True}, known[0]
    assert {row.frames[-2][3] for row in known} == {line}
    times = sum(row.count for row in off)
    assert times == pytest.approx(len(plain.steps(1)), abs=4)
    slept_ms = sum(row.ns - row.runqueue_ns for row in off) / times / 1e6
    assert SLOW_MS * 0.98 <= slept_ms <= SLOW_MS * 1.25
    assert sum(row.count for row in known) >= KNOWN * times, "sleeps without a stack"
    assert not any(row.reason == "sleep" for row in plain.main_rows(0, "off"))


def test_the_other_rank_waits_for_it_in_the_backward_pass(plain: Traced) -> None:
    """DistributedDataParallel reduces gradients inside the backward pass, and there the fast rank waits."""
    waits = [row for row in plain.main_rows(0, "off") if row.reason != "runqueue"]
    backward = [row for row in waits if "_engine_run_backward" in row.functions]
    assert {row.reason for row in backward} <= {"futex", "poll", "gil"}
    steps = len(plain.steps(0))
    assert sum(row.ns for row in backward) / steps / 1e6 > SLOW_MS * 0.4
    lines = {row.frames[row.functions.index("train_step")][3] for row in backward}
    assert lines == {slow_line("loss.backward()")}
    assert sum(row.ns for row in waits if row.frames) >= KNOWN * sum(row.ns for row in waits), "waits without a stack"


def test_garbage_collections_are_as_long_as_the_program_says(plain: Traced) -> None:
    found = plain.query(
        "SELECT rank, pid, tid, toUnixTimestamp64Nano(ts) - (SELECT any(mono_offset_ns) FROM jobs FINAL) AS begin_ns,"
        " duration_ns, uncertainty_ns, functions, lines FROM gc_pauses AS p"
        " LEFT ANY JOIN stacks AS s ON p.run = s.run AND p.stack_id = s.stack_id"
    )
    assert found
    for rank in (0, 1):
        begin, until = plain.window(rank)
        own = [line for line in plain.truth[rank] if "gc" in line and line["pid"] == plain.pids[rank]]
        pauses = [row for row in found if row["pid"] == plain.pids[rank]]
        sampled = [at for row in plain.main_rows(rank, "cpu") for at in (row.begin_ns, row.end_ns)]
        lengths: list[tuple[int, int]] = []
        for pause in pauses:
            assert (pause["rank"], pause["tid"]) == (rank, plain.pids[rank])
            start, length = int(str(pause["begin_ns"])), int(str(pause["duration_ns"]))
            slack = int(str(pause["uncertainty_ns"])) + 1_000_000
            near = [o for o in own if o["start_ns"] < start + length + slack and start - slack < o["end_ns"]]
            assert near or start + length > until - slack, "a pause that the program had not"
            true = max(near, key=lambda line: line["end_ns"] - line["start_ns"], default=None)
            if true is None or true["start_ns"] < begin or true["end_ns"] > until:
                continue  # it began before the trace, or ended after it
            begin_ns, end_ns = true["start_ns"], true["end_ns"]
            assert true.get("called_ns", begin_ns) - slack <= start
            assert start + length <= true.get("returned_ns", end_ns) + slack
            # On a busy machine a thread can be without a CPU at either end. What met a sample is in.
            missed = [at for at in sampled if begin_ns + slack < at < end_ns - slack]
            assert not [at for at in missed if not start - slack <= at <= start + length + slack], (pause, true)
            lengths.append((length, end_ns - begin_ns))
            functions = pause["functions"]
            assert isinstance(functions, list)
            if functions:
                assert "clean_up" in functions
        # Two sampling periods on the CPU are always hit. That one is over is known once its thread was seen after it.
        last = min(until, max(sampled))
        long = [
            line
            for line in own
            if line["end_ns"] - line["start_ns"] > 30_000_000 and begin < line["start_ns"] and line["end_ns"] < last
        ]
        assert long
        spans = [(line["start_ns"], line["end_ns"]) for line in long]
        stored = [(int(str(row["begin_ns"])), int(str(row["duration_ns"]))) for row in pauses]
        assert len(lengths) >= 0.8 * len(long), (begin, last, spans, stored)
        measured, true_ns = (sum(pair[n] for pair in lengths) for n in (0, 1))
        assert 0.6 <= measured / true_ns <= 1.1


def test_dump_shows_every_thread(plain: Traced) -> None:
    assert plain.dumped.startswith("{"), plain.dumped
    threads = json.loads(plain.dumped)["threads"]
    assert {thread["pid"] for thread in threads} == set(plain.pids)
    assert {thread["rank"] for thread in threads} == {0, 1}
    assert all(thread["frames"] for thread in threads if thread["state"] == "waiting"), threads
    for rank in (0, 1):
        (main,) = (thread for thread in threads if thread["tid"] == plain.pids[rank])
        names = [frame["function"] for frame in main["frames"]]
        assert names[:2] == ["<module>", "main"]
        (stager,) = (thread for thread in threads if thread["pid"] == plain.pids[rank] and thread["name"] == "stager")
        assert "Stager.run" in [frame["function"] for frame in stager["frames"]]


def test_stacks_and_exports_of_the_run(plain: Traced, tmp_path: Path) -> None:
    argus: Argus = argus_with(plain.url)

    def done(*words: str) -> str:
        came = argus(*words)
        assert came.returncode == 0, came.stderr
        return came.stdout

    roles = json.loads(done("stacks", "--format", "json", "--last", "30s"))["roles"]
    assert roles[0]["role"] == "main"
    assert {"stager", "pt_gloo_runloop"} <= {role["role"] for role in roles}
    folded = done("export", "folded", "--rank", "0").splitlines()
    assert any("train_step" in line and "Net.forward" in line for line in folded)
    words = [line.rpartition(" ") for line in folded]
    assert all(weight.isdigit() and stack for stack, _, weight in words)
    files = {kind: tmp_path / f"job.{kind}" for kind in ("svg", "speedscope", "pprof")}
    for kind, file in files.items():
        done("export", kind, "-o", str(file))
    assert "Net.forward" in files["svg"].read_text()
    scope = json.loads(files["speedscope"].read_text())
    assert {"Tensor.backward", "Adam.step"} <= {frame["name"].partition(" ")[0] for frame in scope["shared"]["frames"]}
    assert b"Tensor.backward" in gzip.decompress(files["pprof"].read_bytes())
    compared = argus("export", "folded", "--kind", "off", "--thread", "main", "--rank", "1", "--diff", "rank=others",
                     "--per", "second")  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    (more,) = (line for line in compared.stderr.splitlines() if "wait_for_data" in line)
    assert more.strip().startswith("more"), compared.stderr


# ---- what torchrun's job shows


def test_a_rank_slow_in_its_workers_is_seen_there(launched: Traced) -> None:
    line = slow_line("# a slow disk")
    own = {worker for worker, rank in launched.workers.items() if rank == 1}
    slow = [row for row in launched.rows() if row.reason == "sleep" and "Numbers.read_slowly" in row.functions]
    assert {row.tid for row in slow} == own
    assert {row.frames[row.functions.index("Numbers.read_slowly")][3] for row in slow} == {line}
    others = [row for row in launched.rows() if row.reason == "sleep" and row.rank == 0]
    assert not any("Numbers.read_slowly" in row.functions for row in others)
    waiting = [row for row in launched.main_rows(1, "off") if "_BaseDataLoaderIter.__next__" in row.functions]
    assert waiting, "the main thread waits for its workers"
    for_data = [row for row in waiting if row.reason in ("poll", "futex", "read")]
    assert sum(row.ns for row in for_data) >= 0.5 * sum(row.ns for row in waiting if row.reason != "runqueue")


def test_the_launcher_is_no_rank(launched: Traced) -> None:
    found = launched.query(
        "SELECT pid, rank, toString(rank_source) AS source, toString(state) AS state FROM ranks FINAL"
    )
    assert {(row["pid"], row["rank"]) for row in found if row["source"] != "parent"} == {
        (pid, rank) for rank, pid in enumerate(launched.pids)
    }
    assert {row["state"] for row in found} == {"exited"}
