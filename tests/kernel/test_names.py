"""Kernel names that a probe could not read, or not wholly, and more registrations at once than any import makes.

Small libraries with the real names, compiled here. Names lie in a file that the program maps and never touches: a probe
cannot read them, since it may not wait for a page.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import wait_for_cuda

pytestmark = pytest.mark.kernel

STUB = 0x10000
"""Handle of the first kernel. No symbol covers it, so that only the registration has its name."""
FEW = 40
MANY = 45_000
ALL_THAT_FIT = 65_000
SLOT = 512
"""Bytes from one name to the next in the file."""
NAME_BYTES = 150
"""Of an ordinary name; every 16th has three times as many, more than a record has room for."""

LIBCUDA = """
__attribute__((noinline)) int cuLaunchKernel(void *f) { __asm__ volatile("" ::: "rbx", "memory"); return 0; }
__attribute__((noinline)) int cuLibraryGetKernel(void **out, void *library, const char *name)
{ __asm__ volatile("" ::: "rbx", "memory"); *out = library; return 0; }
"""

LIBCUDART = """
struct dim3 { unsigned x, y, z; };
__attribute__((noinline))
int cudaLaunchKernel(const void *f, struct dim3 g, struct dim3 b, void **args, unsigned long s, void *stream)
{ __asm__ volatile("" ::: "rbx", "memory"); return 0; }
__attribute__((noinline)) void __cudaRegisterFunction(void **module, const char *stub, char *function, const char *name)
{ __asm__ volatile("" ::: "rbx", "memory"); }
"""

PROGRAM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
struct dim3 { unsigned x, y, z; };
typedef unsigned u;
int cuLaunchKernel(void *, u, u, u, u, u, u, u, void *, void **, void **);
int cuLibraryGetKernel(void **, void *, const char *);
int cudaLaunchKernel(const void *, struct dim3, struct dim3, void **, unsigned long, void *);
void __cudaRegisterFunction(void **, const char *, char *, const char *);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* CASE GO NAMES KERNELS STEP: registers so many kernels and launches every so many-th. */
int main(int argc, char **argv)
{
    struct dim3 one = {1, 1, 1};
    struct stat size;
    long kernels = atol(argv[4]), step = atol(argv[5]);
    int file = open(argv[3], O_RDONLY);
    fstat(file, &size);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    char *names = mmap(0, size.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    void *kernel;
    madvise(names, size.st_size, MADV_RANDOM); /* a page that is touched brings no others */
    if (!strcmp(argv[1], "mixed")) /* the program has read the first half, so a probe can too */
        for (long i = 0; i < size.st_size / 2; i += 4096) (void)*(volatile char *)(names + i);
    while (access(argv[2], F_OK)) usleep(1000);
    double begin = now();
    for (long i = 0; i < kernels; i++)
        if (!strcmp(argv[1], "driver"))
            cuLibraryGetKernel(&kernel, (void *)(STUB + i), names + i * SLOT);
        else
            __cudaRegisterFunction(0, (char *)(STUB + i), 0, names + i * SLOT);
    printf("%.6f\\n", now() - begin);
    fflush(stdout);
    for (long i = 0; i < kernels; i += step)
        if (!strcmp(argv[1], "driver"))
            cuLaunchKernel((void *)(STUB + i), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
        else
            cudaLaunchKernel((void *)(STUB + i), one, one, 0, 0, 0);
    if (!strcmp(argv[1], "gone")) munmap(names, size.st_size);
    usleep(1500000); /* names are read while the program runs */
    return 0;
}
"""


def name_of(number: int) -> str:
    """The name of a kernel: a long one for every 16th."""
    text = f"kernel_{number}_"
    return text + "x" * (NAME_BYTES * (3 if number % 16 == 0 else 1) - len(text))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")

    def build(name: str, source: str, *more: str) -> None:
        (folder / f"{name}.c").write_text(source)
        command = ["gcc", "-O2", "-fcf-protection=none", "-o", str(folder / name), str(folder / f"{name}.c"), *more]
        subprocess.run(command, check=True)

    build("libcuda.so.1", LIBCUDA, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    build("libcudart.so.13", LIBCUDART, "-shared", "-fPIC", "-Wl,-soname,libcudart.so.13")
    link = [f"-L{folder}", "-Wl,-rpath,$ORIGIN", "-l:libcudart.so.13", "-l:libcuda.so.1"]
    build("names", PROGRAM, f"-DSTUB={STUB:#x}L", f"-DSLOT={SLOT}", *link)
    return folder / "names"


def traced(
    program: Path, store_url: str, tmp_path: Path, case: str, kernels: int, step: int, *, drain: bool = True
) -> tuple[dict[int, str], dict[str, int]]:
    """Names of the kernels launched, by number, and the counters. ``drain``: read the rings while kernels register."""
    path = tmp_path / "kernel_names"
    path.write_bytes(b"".join(name_of(i).encode().ljust(SLOT, b"\0") for i in range(kernels)))
    subprocess.run(["sync", path], check=True)
    go = tmp_path / "go"
    process = subprocess.Popen([program, case, go, path, str(kernels), str(step)], stdout=subprocess.PIPE, text=True)
    try:
        wait_for_cuda([process.pid])
        tracer = Tracer(open_store(store_url), Options(pids=(process.pid,)))
        tracer.start()
        tracer.poll()
        go.touch()
        assert process.stdout is not None
        if not drain:
            print(f"{kernels} registrations took", process.stdout.readline())
        deadline = time.monotonic() + 30
        while not tracer.done() and time.monotonic() < deadline:
            tracer.poll()
            time.sleep(0.02)
        counters = {name: value for name, (value, _) in tracer.counters().items()}
        assert tracer.stop() == {}
    finally:
        process.kill()
        process.wait()
    with open_store(store_url) as store:
        rows = query(store, "SELECT handle, kernel FROM launches WHERE kind = 'kernel'").to_pylist()
    return {row["handle"] - STUB: row["kernel"] for row in rows}, counters


@pytest.mark.parametrize("case", ["runtime", "driver"])
def test_names_in_memory_that_was_never_touched_are_read_later(
    program: Path, store_url: str, tmp_path: Path, case: str
) -> None:
    names, counters = traced(program, store_url, tmp_path, case, FEW, 1)
    assert names == {i: name_of(i) for i in range(FEW)}
    assert counters["names_read_later"] == FEW
    assert (counters["read_fault"], counters["kernels_without_name"], counters["kernel_names_cut"]) == (0, 0, 0)


def test_a_name_that_is_gone_is_counted(program: Path, store_url: str, tmp_path: Path) -> None:
    names, counters = traced(program, store_url, tmp_path, "gone", FEW, 20)
    assert names == {i: f"kernel@{STUB + i:#x}" for i in (0, 20)}
    assert (counters["names_read_later"], counters["kernels_without_name"]) == (FEW, 2)


def test_an_import_of_many_kernels_loses_nothing(program: Path, store_url: str, tmp_path: Path) -> None:
    """As ``import torch`` does: half of the names can be read at once."""
    names, counters = traced(program, store_url, tmp_path, "mixed", MANY, 450)
    assert names == {i: name_of(i) for i in range(0, MANY, 450)}
    assert counters["control_dropped"] == 0
    assert MANY // 2 <= counters["names_read_later"] < MANY * 0.6


def test_registrations_wait_for_a_tracer_that_has_no_time(program: Path, store_url: str, tmp_path: Path) -> None:
    """The ring holds this many with nobody reading it."""
    names, counters = traced(program, store_url, tmp_path, "mixed", ALL_THAT_FIT, 650, drain=False)
    assert names == {i: name_of(i) for i in range(0, ALL_THAT_FIT, 650)}
    assert counters["control_dropped"] == 0
