"""Calls inside calls, made to deceive: what is inside is not counted twice, what is not inside is not swallowed.

Small libraries with the real names, compiled here, whose functions do nothing but call one another.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from argus.capture.process.targets import descendants
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import poll_until, wait_for_cuda, wait_until

pytestmark = pytest.mark.kernel

TIMES = 101

LIBCUDA = """
#define LAUNCH void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s, \\
               void *stream, void **p, void **x
__attribute__((noinline)) int cuLaunchKernel(LAUNCH) { __asm__ volatile("" ::: "rbx", "memory"); return 0; }
__attribute__((noinline)) int cuLaunchKernel_ptsz(LAUNCH) { __asm__ volatile("" ::: "rbx", "memory"); return 0; }
__attribute__((noinline)) int cuLibraryGetKernel(void **out, void *library, const char *name)
{ __asm__ volatile("" ::: "rbx", "memory"); *out = (void *)(0x77 + (*(volatile const char *)name == 0)); return 0; }
__attribute__((noinline)) int cuLibraryLoadData(void **out, const void *code)
{ __asm__ volatile("" ::: "rbx", "memory"); *out = (void *)0x88; return 0; }
"""

LIBCUDART = """
struct dim3 { unsigned x, y, z; };
typedef unsigned u;
int cuLaunchKernel(void *, u, u, u, u, u, u, u, void *, void **, void **);
int cuLibraryLoadData(void **, const void *);
int load_first = 0;
__attribute__((noinline))
int cudaLaunchKernel(const void *f, struct dim3 g, struct dim3 b, void **args, unsigned long s, void *stream)
{
    void *library;
    if (load_first)
        cuLibraryLoadData(&library, f);
    int result = cuLaunchKernel((void *)f, g.x, g.y, g.z, b.x, b.y, b.z, s, stream, args, 0);
    __asm__ volatile("" ::: "rbx", "memory");
    return result;
}
/* As a wrapper that the compiler turned into a jump. */
__attribute__((naked)) int cudaLaunchKernel_ptsz(void) { __asm__("jmp cuLaunchKernel_ptsz@PLT"); }
"""

LIBNCCL = """
typedef struct { char internal[128]; } ncclUniqueId;
int cuLibraryGetKernel(void **, void *, const char *);
__attribute__((noinline)) int ncclAllReduce(void) { __asm__ volatile("" ::: "rbx", "memory"); return 0; }
__attribute__((noinline)) int ncclCommInitRank(void **comm, int nranks, ncclUniqueId id, int rank)
{
    void *kernel;
    cuLibraryGetKernel(&kernel, (void *)1, "ncclDevKernel_Generic");
    __asm__ volatile("" ::: "rbx", "memory");
    *comm = (void *)(0x1000L + rank);
    return nranks == 7 ? 7 : 0; /* 7: ncclInProgress */
}
"""

PROGRAM = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
struct dim3 { unsigned x, y, z; };
typedef struct { char internal[128]; } ncclUniqueId;
extern int load_first;
typedef unsigned u;
int cuLaunchKernel(void *, u, u, u, u, u, u, u, void *, void **, void **);
int cudaLaunchKernel(const void *, struct dim3, struct dim3, void **, unsigned long, void *);
int cudaLaunchKernel_ptsz(const void *, struct dim3, struct dim3, void **, unsigned long, void *);
int ncclCommInitRank(void **, int, ncclUniqueId, int);
int ncclAllReduce(void);

/* Deeper than the runtime call was, over memory it leaves as it is: that call's return address still lies there. */
__attribute__((noinline)) void deep(void *f)
{
    char untouched[8192];
    __asm__ volatile("" :: "r"(untouched) : "memory");
    cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
    __asm__ volatile("" ::: "memory");
}

int main(int argc, char **argv)
{
    struct dim3 one = {1, 1, 1};
    ncclUniqueId id;
    void *comm;
    while (access(argv[2], F_OK)) usleep(1000);
    if (!strcmp(argv[1], "loop"))
        for (long i = 0; i < TIMES; i++) cudaLaunchKernel((void *)i, one, one, 0, 0, 0);
    if (!strcmp(argv[1], "stale")) {
        cudaLaunchKernel((void *)1, one, one, 0, 0, 0);
        for (long i = 0; i < TIMES; i++) deep((void *)i);
    }
    if (!strcmp(argv[1], "tail"))
        for (long i = 0; i < TIMES; i++) cudaLaunchKernel_ptsz((void *)i, one, one, 0, 0, 0);
    if (!strcmp(argv[1], "load")) {
        load_first = 1;
        for (long i = 0; i < TIMES; i++) cudaLaunchKernel((void *)i, one, one, 0, 0, 0);
    }
    if (!strcmp(argv[1], "init")) {
        memset(&id, 0xa5, sizeof id);
        ncclCommInitRank(&comm, 5, id, 3);
        ncclCommInitRank(&comm, 7, id, 4);
    }
    usleep(500000); /* what follows comes in a later batch of records */
    ncclAllReduce();
    usleep(200000);
    return argc - argc;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nested")

    def build(name: str, source: str, *more: str) -> None:
        (folder / f"{name}.c").write_text(source)
        command = ["gcc", "-O2", "-fcf-protection=none", "-o", str(folder / name), str(folder / f"{name}.c"), *more]
        subprocess.run(command, check=True)

    link = [f"-L{folder}", "-Wl,-rpath,$ORIGIN"]
    build("libcuda.so.1", LIBCUDA, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    build("libcudart.so.13", LIBCUDART, "-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", *link, "-l:libcuda.so.1")
    build("libnccl.so.2", LIBNCCL, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", *link, "-l:libcuda.so.1")
    libraries = ["-l:libcudart.so.13", "-l:libnccl.so.2", "-l:libcuda.so.1"]
    build("nested", PROGRAM, f"-DTIMES={TIMES}", *link, *libraries)
    return folder / "nested"


def children(pid: int) -> list[int]:
    return [child for child in descendants([pid]) if child != pid]


def counts(program: Path, store_url: str, tmp_path: Path, case: str) -> dict[str, int]:
    """How often each call is stored."""
    go = tmp_path / "go"
    process = subprocess.Popen([program, case, go])
    try:
        wait_for_cuda([process.pid])
        tracer = Tracer(open_store(store_url), Options(pids=(process.pid,)))
        tracer.start()
        go.touch()
        deadline = time.monotonic() + 30
        while not tracer.done() and time.monotonic() < deadline:
            tracer.poll()
            time.sleep(0.02)
        assert tracer.stop() == {}
    finally:
        process.kill()
        process.wait()
    with open_store(store_url) as store:
        rows = query(store, "SELECT call, count() AS n FROM launches GROUP BY call").to_pylist()
    return {row["call"]: row["n"] for row in rows}


def test_each_turn_of_a_loop_is_a_call(program: Path, store_url: str, tmp_path: Path) -> None:
    assert counts(program, store_url, tmp_path, "loop") == {"cudaLaunchKernel": TIMES}


def test_a_return_address_left_on_the_stack_swallows_nothing(program: Path, store_url: str, tmp_path: Path) -> None:
    assert counts(program, store_url, tmp_path, "stale") == {"cudaLaunchKernel": 1, "cuLaunchKernel": TIMES}


def test_a_jump_from_the_runtime_to_the_driver_is_one_call(program: Path, store_url: str, tmp_path: Path) -> None:
    assert counts(program, store_url, tmp_path, "tail") == {"cudaLaunchKernel_ptsz": TIMES}


def test_code_loaded_inside_a_launch_is_seen(program: Path, store_url: str, tmp_path: Path) -> None:
    """Lazy loading, and what is compiled then, happens inside the first launch of a kernel."""
    seen = counts(program, store_url, tmp_path, "load")
    assert seen == {"cudaLaunchKernel": TIMES, "cuLibraryLoadData": TIMES}
    with open_store(store_url) as store:
        rows = query(store, "SELECT min(duration_ns) AS d, any(handle) AS h FROM launches WHERE kind = 'module'")
    assert rows.to_pylist()[0]["d"] > 0
    assert rows.to_pylist()[0]["h"] == 0x88


def test_making_a_communicator_survives_looking_kernels_up(program: Path, store_url: str, tmp_path: Path) -> None:
    counts(program, store_url, tmp_path, "init")
    with open_store(store_url) as store:
        rows = query(
            store,
            "SELECT nranks, comm_rank, comm, unique_id, duration_ns, result FROM communicator_calls ORDER BY ts",
        ).to_pylist()
    assert [(row["nranks"], row["comm_rank"], row["comm"]) for row in rows] == [(5, 3, 0x1003), (7, 4, 0x1004)]
    assert all(row["unique_id"] == "a5" * 128 and row["duration_ns"] > 0 for row in rows)
    assert [row["result"] for row in rows] == [0, 7]


def test_a_followed_child_s_first_call_may_be_about_a_communicator(
    program: Path, store_url: str, tmp_path: Path
) -> None:
    """It makes no CUDA call before, so nothing else shows that it is a rank."""
    probed, followed = tmp_path / "probed", tmp_path / "followed"
    launcher = subprocess.Popen(["sh", "-c", f"{program} loop {probed}; {program} init {followed}; sleep 0.3"])
    try:
        tracer = Tracer(open_store(store_url), Options(pids=(launcher.pid,), children=True))
        tracer.start()
        family = tracer._roster.family
        poll_until(tracer, lambda: bool(tracer.attached), what="the first child's libraries to be probed")
        (first,) = children(launcher.pid)
        probed.touch()
        poll_until(tracer, lambda: children(launcher.pid) not in ([], [first]), what="the second child")
        # A child that calls before its fork is heard of is counted (calls_before_follow), and not what is tested here.
        wait_until(lambda: any(child in family for child in children(launcher.pid)), what="the fork to be heard of")
        followed.touch()
        poll_until(tracer, tracer.done, what="the end of all")
        lost = tracer.stop()
    finally:
        launcher.kill()
        launcher.wait()
    with open_store(store_url) as store:
        rows = query(store, "SELECT comm_rank FROM communicator_calls ORDER BY ts").to_pylist()
    assert lost == {}
    assert [row["comm_rank"] for row in rows] == [3, 4]
