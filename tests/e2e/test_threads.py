"""Accounts of threads against what the threads themselves measure, from both sources: taskstats and /proc."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.process import threads
from argus.capture.process.threads import ThreadWatch
from argus.model.records import NOT_MEASURED, THREAD_USAGE

MS = 1_000_000

# A worker named "worker" does what each line of the input says, and prints its number, and its CPU time in ns.
PROGRAM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static char line[4096];
static sem_t go, done;
static long worker_tid;
static long cpu_now(void) {
    struct timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return t.tv_sec * 1000000000L + t.tv_nsec;
}
static void burn(long ms) { long end = cpu_now() + ms * 1000000; while (cpu_now() < end); }
static void *burner(void *ms) { prctl(PR_SET_NAME, "burner"); burn((long)ms); return NULL; }
static void *sleeper(void *unused) { prctl(PR_SET_NAME, "sleeper"); pause(); return unused; }
static volatile long finish;
static void *until_finished(void *unused) { burn(30); while (!finish) usleep(1000); return unused; }
static long used;
static void *worker(void *unused) {
    prctl(PR_SET_NAME, "worker");
    worker_tid = syscall(SYS_gettid);
    for (;;) {
        long n; char path[4000];
        sem_post(&done);
        sem_wait(&go);
        if (sscanf(line, "burn %ld", &n) == 1) burn(n);
        if (sscanf(line, "sleep %ld", &n) == 1)
            for (long i = 0; i < n; i++) { struct timespec t = {0, 100000}; nanosleep(&t, NULL); }
        if (sscanf(line, "sync %ld %s", &n, path) == 2) {
            int fd = open(path, O_RDWR | O_CREAT, 0600);
            for (long i = 0; i < n; i++) { if (pwrite(fd, line, 4096, i * 4096) != 4096 || fsync(fd)) exit(3); }
            close(fd);
        }
        used = cpu_now();
    }
    return unused;
}
static pthread_t begin(void *(*f)(void *), void *argument) {
    pthread_t t; if (pthread_create(&t, NULL, f, argument)) exit(2); return t;
}
int main(void) {
    sem_init(&go, 0, 0); sem_init(&done, 0, 0);
    begin(worker, NULL); sem_wait(&done);
    pthread_t late = 0;
    do {
        long n;
        if (sscanf(line, "pair %ld", &n) == 1) {
            cpu_set_t one, all; sched_getaffinity(0, sizeof all, &all);
            int cpu = 0; while (!CPU_ISSET(cpu, &all)) cpu++;
            CPU_ZERO(&one); CPU_SET(cpu, &one); sched_setaffinity(0, sizeof one, &one);
            /* The main thread burns too, so that both live until they are read. */
            late = begin(burner, (void *)n); burn(n); pthread_join(late, NULL);
            sched_setaffinity(0, sizeof all, &all);
        } else if (!strncmp(line, "begin", 5)) { finish = 0; late = begin(until_finished, NULL); usleep(60000);
        } else if (!strncmp(line, "end", 3)) { finish = 1; pthread_join(late, NULL);
        } else if (sscanf(line, "many %ld", &n) == 1) { while (n--) begin(sleeper, NULL);
        } else if (line[0]) { sem_post(&go); sem_wait(&done); }
        printf("%ld %ld\n", worker_tid, used); fflush(stdout);
    } while (fgets(line, sizeof line, stdin));
    return 0;
}
"""


class Program:
    """The C program, and what it says of its worker."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.pid = self.process.pid
        self.worker, self.cpu_ns = self._read()

    def _read(self) -> tuple[int, int]:
        assert self.process.stdout is not None
        tid, cpu_ns = self.process.stdout.readline().split()
        return int(tid), int(cpu_ns)

    def do(self, what: str) -> int:
        """The worker's CPU time in all, when it was done."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.worker, self.cpu_ns = self._read()
        return self.cpu_ns

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("threads") / "program"
    subprocess.run(["gcc", "-O1", "-pthread", "-xc", "-", "-o", path], input=PROGRAM, text=True, check=True)
    return path


Begin = Callable[[], Program]


@pytest.fixture
def program(binary: Path) -> Iterator[Program]:
    running = Program(binary)
    yield running
    running.end()


@pytest.fixture(params=["taskstats", "files"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where accounts come from."""
    if request.param == "files":
        monkeypatch.setattr(threads, "_taskstats", lambda: "switched off by the test")
    elif isinstance(threads._taskstats(), str):
        pytest.skip(f"taskstats: {threads._taskstats()}")
    return str(request.param)


def now() -> int:
    return time.monotonic_ns()


def row_of(rows: NDArray[np.void], tid: int) -> np.void:
    found = rows[rows["tid"] == tid]
    assert len(found) == 1
    row: np.void = found[0]
    return row


def asleep(pid: int, tid: int) -> None:
    """Waits until a thread has gone to sleep: its accounts are complete then."""
    for _ in range(1000):
        text = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
        if text[text.rindex(")") + 2] == "S":
            return
        time.sleep(0.005)
    raise AssertionError("it did not go to sleep")


def test_names_are_those_that_threads_gave_themselves(program: Program) -> None:
    watch = ThreadWatch(program.pid)
    assert watch.names() == {program.pid: "program", program.worker: "worker"}
    program.do("many 5")
    for _ in range(500):  # they name themselves
        if list(watch.names().values()).count("sleeper") == 5:
            break
        time.sleep(0.01)
    assert sorted(watch.names().values()) == ["program", *["sleeper"] * 5, "worker"]


@pytest.mark.usefixtures("source")
def test_cpu_time_and_switches_are_what_the_thread_itself_counted(program: Program) -> None:
    watch = ThreadWatch(program.pid)
    assert watch.state["run-queue"] == "on"
    first = program.do("burn 1")
    asleep(program.pid, program.worker)
    begin = now()
    assert len(watch.usage(begin)) == 0
    second = program.do("burn 41")
    asleep(program.pid, program.worker)
    end = now()
    rows = watch.usage(end)
    assert rows.dtype == THREAD_USAGE
    assert sorted(rows["tid"].tolist()) == sorted([program.pid, program.worker])
    row = row_of(rows, program.worker)
    assert (row["pid"], row["begin_ns"], row["end_ns"]) == (program.pid, begin, end)
    assert row["cpu_ns"] == pytest.approx(second - first, abs=5 * MS)
    assert row["cpu_ns"] >= 41 * MS
    # It could have had the CPU from the beginning on, else it waited for it.
    assert 0 <= row["runqueue_ns"] <= end - begin - row["cpu_ns"] + 5 * MS
    program.do("sleep 101")
    asleep(program.pid, program.worker)
    row = row_of(watch.usage(now()), program.worker)
    # Who loses the CPU after the sleep was set up, and gets it back when that is over, does not go by itself.
    assert 101 - row["switches_involuntary"] <= row["switches_voluntary"] <= 106
    row = row_of(watch.usage(now()), program.worker)
    assert (row["cpu_ns"], row["switches_voluntary"], row["runqueue_ns"]) == (0, 0, 0)


@pytest.mark.usefixtures("source")
def test_waiting_for_a_cpu_is_reported(program: Program) -> None:
    watch = ThreadWatch(program.pid)
    watch.usage(now())
    program.do("pair 60")
    row = row_of(watch.usage(now()), program.pid)
    # Two threads on one CPU: while one ran, the other waited.
    assert row["runqueue_ns"] > 20 * MS
    assert row["cpu_ns"] >= 59 * MS
    assert row["switches_involuntary"] > 0


@pytest.mark.usefixtures("source")
def test_threads_that_come_and_go(program: Program) -> None:
    watch = ThreadWatch(program.pid)
    begin = now()
    watch.usage(begin)
    program.do("begin")
    rows = watch.usage(now())
    assert len(rows) == 3
    late = next(row for row in rows if row["tid"] not in (program.pid, program.worker))
    assert late["cpu_ns"] > 0
    assert begin <= late["begin_ns"] < late["end_ns"]
    assert watch.counters["threads_ended"] == 0
    program.do("end")
    assert len(watch.usage(now())) == 2
    assert watch.counters == {"threads_ended": 1, "threads_unread": 0, "thread_times_rejected": 0}


@pytest.mark.usefixtures("source")
def test_a_process_that_ended_has_no_threads(program: Program) -> None:
    watch = ThreadWatch(program.pid)
    watch.usage(now())
    program.end()
    assert len(watch.usage(now())) == 0
    assert watch.names() == {}
    assert watch.counters["threads_ended"] == 2
    watch.close()
    assert len(watch.usage(now())) == 0
    with pytest.raises(OSError):
        ThreadWatch(program.pid)


def test_more_threads_than_fit_into_a_message(program: Program, source: str) -> None:
    program.do("many 150")
    watch = ThreadWatch(program.pid)
    watch.usage(now())
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        rows = watch.usage(now())
        took.append(time.perf_counter() - begin)
    assert sorted(rows["tid"].tolist()) == sorted(int(tid) for tid in os.listdir(f"/proc/{program.pid}/task"))
    assert watch.counters["threads_unread"] == 0
    # 1.5 ms where nothing else runs; files take 5.
    assert min(took) < (0.1 if source == "taskstats" else 0.3)


def test_a_number_given_to_another_thread_begins_at_nothing(program: Program, source: str) -> None:
    program.do("burn 20")
    watch = ThreadWatch(program.pid)
    watch.usage(now())
    assert watch._last is not None
    # The one of before began long ago, and had used less CPU time (taskstats) or more (both can show it).
    watch._last_ns = 1
    if source == "taskstats":
        watch._last["cpu_ns"] = 5
        watch._last["began_ns"] = 1
    else:
        watch._last["cpu_ns"] += 10**12
    end = now()
    row = row_of(watch.usage(end), program.worker)
    assert row["cpu_ns"] == pytest.approx(program.cpu_ns, abs=5 * MS)
    if source == "taskstats":
        assert end - 60_000 * MS < row["begin_ns"] < end - 20 * MS


def test_a_thread_that_was_not_read_before_has_no_row(program: Program) -> None:
    if isinstance(threads._taskstats(), str):
        pytest.skip(f"taskstats: {threads._taskstats()}")
    watch = ThreadWatch(program.pid)
    time.sleep(0.2)  # long before the reading that missed it
    watch.usage(now())
    assert watch._last is not None
    watch._last = watch._last[watch._last["tid"] != program.worker]
    # All that it used since it began would seem to have been used since then.
    assert watch.usage(now())["tid"].tolist() == [program.pid]
    assert len(watch.usage(now())) == 2


def test_without_accounting_time_for_disks_is_unknown(
    program: Program, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysctl = tmp_path / "task_delayacct"
    monkeypatch.setattr(threads, "_SYSCTL", sysctl)
    watch = ThreadWatch(program.pid)
    watch.usage(now())
    assert watch.state["I/O"] == "off: the kernel does not account for it (CONFIG_TASK_DELAY_ACCT)"
    sysctl.write_text("0\n")
    rows = watch.usage(now())
    assert (rows["io_ns"] == NOT_MEASURED).all()
    assert watch.state["I/O"] == "off: kernel.task_delayacct is 0 (sysctl -w kernel.task_delayacct=1)"
    sysctl.write_text("1\n")
    if source == "files":
        watch.usage(now())
        assert watch.state["I/O"] == "off: switched off by the test"


@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="sets a sysctl: needs root")
def test_waits_for_a_disk_are_reported_for_threads_that_are_accounted(
    binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysctl = threads._SYSCTL
    if not sysctl.exists() or isinstance(threads._taskstats(), str):
        pytest.skip("the kernel does not account for delays")
    monkeypatch.setattr(threads, "_accounted_ns", [])
    before = sysctl.read_text()
    old = Program(binary)
    try:
        sysctl.write_text("1")
        watch = ThreadWatch(old.pid)
        watch.usage(now())
        old.do(f"sync 20 {tmp_path}/file")
        rows = watch.usage(now())
        if before.strip() == "0":
            # It began before: the kernel has no account of it, and 0 would be a lie.
            assert (rows["io_ns"] == NOT_MEASURED).all()
            assert watch.state["I/O"].startswith("off: all threads began before kernel.task_delayacct was set")
        new = Program(binary)
        try:
            watch = ThreadWatch(new.pid)
            watch.usage(now())
            assert (watch.usage(now())["io_ns"] == 0).all()
            source, rejected, seen = threads._taskstats(), 0, []
            assert not isinstance(source, str)

            def kernel_account() -> dict[int, int]:
                both = (new.pid, new.worker)
                return dict(zip(both, source.ask(list(both))[0]["blkio_delay"].tolist(), strict=True))

            for _ in range(50):
                begin, before_ns = now(), kernel_account()
                watch.usage(now())
                read = now()
                new.do(f"sync 1 {tmp_path}/file")
                least = now() - read
                rows = watch.usage(now())
                took = now() - begin
                assert watch.state["I/O"] == "on"
                for tid in (new.pid, new.worker):
                    row = row_of(rows, tid)
                    if row["io_ns"] == NOT_MEASURED:
                        # The kernel counted from an earlier wait, or from boot: more than there was.
                        grown = kernel_account()[tid] - before_ns[tid]
                        assert grown > least - row["cpu_ns"] - row["runqueue_ns"]
                        rejected += 1
                    elif tid == new.pid:
                        assert row["io_ns"] == 0
                    else:
                        assert 0 <= row["io_ns"] <= took + threads._ROUNDING_NS
                        seen.append(int(row["io_ns"]))
                assert watch.counters["thread_times_rejected"] == rejected
            if not any(seen):
                pytest.skip(f"no wait for a disk that can be believed: {len(seen)} of 0 ns, {rejected} impossible")
        finally:
            new.end()
    finally:
        sysctl.write_text(before)
        old.end()


def test_a_process_that_has_not_run_is_not_asked_for(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ThreadWatch(program.pid)
    program.do("burn 1")
    ran = -1
    while ran != (ran := threads.cpu_ns(program.pid)):  # until it waits for the next line
        time.sleep(0.05)
    watch.usage(now())
    watch.usage(now())
    asked: list[int] = []
    real = watch._read
    monkeypatch.setattr(watch, "_read", lambda now_ns: asked.append(now_ns) or real(now_ns))
    begin, end = watch._last_ns, now()
    rows = watch.usage(end)
    assert asked == []
    assert program.worker in rows["tid"].tolist()
    assert set(rows["begin_ns"].tolist()) == {begin}
    assert set(rows["end_ns"].tolist()) == {end}
    assert not rows["cpu_ns"].any()
    assert set(rows["io_ns"].tolist()) <= {0, NOT_MEASURED}
    program.do("burn 20")
    row = row_of(watch.usage(now()), program.worker)
    assert len(asked) == 1
    assert row["begin_ns"] == end
    assert row["cpu_ns"] >= 20 * MS


@pytest.mark.alone  # a thread that does not get its CPU is reported otherwise
def test_a_wait_for_a_disk_is_no_longer_than_there_was_time(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's accounts of a program that waits for no disk, with such waits added."""
    real = threads._taskstats()
    if isinstance(real, str):
        pytest.skip(f"taskstats: {real}")
    added = 0

    class WithWaits:
        def ask(self, tids: list[int]) -> tuple[np.ndarray, int]:
            stats, unread = real.ask(tids)
            stats = stats.copy()
            stats["blkio_delay"] += added
            return stats, unread

    (tmp_path / "sysctl").write_text("1\n")
    monkeypatch.setattr(threads, "_SYSCTL", tmp_path / "sysctl")
    monkeypatch.setattr(threads, "_accounted_ns", [0])
    monkeypatch.setattr(threads, "_taskstats", WithWaits)
    monkeypatch.setattr(threads, "cpu_ns", lambda pid: -1)  # else what has not run is not asked for
    watch = ThreadWatch(program.pid)

    unbelieved = 0

    def reported_wait(more_ns: int, meanwhile: Callable[[], object]) -> int:
        nonlocal added, unbelieved
        before = watch.usage(now())
        begin = now()
        meanwhile()
        added += min(more_ns, now() - begin) if more_ns > 0 else now() - begin - more_ns
        rows = watch.usage(now())
        unbelieved += sum(int(np.sum(each["io_ns"] == NOT_MEASURED)) for each in (before, rows))
        return int(row_of(rows, program.worker)["io_ns"])

    assert reported_wait(20_000_000, lambda: time.sleep(0.03)) == 20_000_000
    assert watch.counters["thread_times_rejected"] == 0
    assert reported_wait(-50_000_000, lambda: time.sleep(0.03)) == NOT_MEASURED, "more than there was time"
    assert reported_wait(1 << 60, lambda: program.do("burn 30")) == NOT_MEASURED, "it ran"
    assert reported_wait(20_000_000, lambda: time.sleep(0.03)) == 20_000_000
    assert watch.counters["thread_times_rejected"] == unbelieved >= 3, "two threads, and the one that ran at least"


def test_without_privilege_files_are_read(program: Program) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give it up")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setresuid(65534, 65534, 65534)
            threads._taskstats.cache_clear()
            watch = ThreadWatch(program.pid)
            watch.usage(now())
            rows = watch.usage(now())
            reported = threads._taskstats()
            code = 0 if len(rows) == 2 and reported == "needs CAP_NET_ADMIN (run Argus with sudo)" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_records_of_another_layout_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(threads._taskstats(), str):
        pytest.skip(f"taskstats: {threads._taskstats()}")
    for field, wrong in (("cpu_run", 64), ("pid", 136), ("voluntary", 264)):
        moved = {name: (kind, wrong if name == field else at) for name, (kind, at) in threads._STATS_FIELDS.items()}
        names = list(moved)
        dtype = {"names": names, "formats": [moved[n][0] for n in names], "offsets": [moved[n][1] for n in names]}
        monkeypatch.setattr(threads, "STATS", np.dtype({**dtype, "itemsize": threads._STATS_BYTES}))
        time.sleep(0.001)  # a switch of this thread: its count is not 0
        with pytest.raises(OSError, match="have another layout"):
            threads._Taskstats()


def test_the_layout_is_that_of_the_kernel_s_header(tmp_path: Path) -> None:
    members = {
        "version": "version",
        "cpu_delay": "cpu_delay_total",
        "blkio_count": "blkio_count",
        "blkio_delay": "blkio_delay_total",
        "swapin_count": "swapin_count",
        "cpu_run": "cpu_run_virtual_total",
        "pid": "ac_pid",
        "elapsed_us": "ac_etime",
        "voluntary": "nvcsw",
        "involuntary": "nivcsw",
        "freepages_count": "freepages_count",
        "thrashing_count": "thrashing_count",
    }
    lines = [f'printf("{field} %zu\\n", offsetof(struct taskstats, {name}));' for field, name in members.items()]
    source = "#include <stdio.h>\n#include <stddef.h>\n#include <linux/taskstats.h>\nint main(void) {" + "".join(lines)
    done = subprocess.run(["gcc", "-xc", "-", "-o", tmp_path / "layout"], input=source + "}", text=True)
    if done.returncode:
        pytest.skip("linux/taskstats.h is not installed")
    reported = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.split()
    offsets = dict(zip(reported[::2], map(int, reported[1::2]), strict=True))
    assert {name: threads._STATS_FIELDS[name][1] for name in members} == offsets
