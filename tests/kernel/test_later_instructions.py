"""Probes behind a function's first instructions: hit once a call, with the arguments and stack of the call's begin."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture import prices
from argus.capture.attachment import Attachment
from argus.capture.kernel.links import Backend
from argus.capture.probes import Probes, kernel_version
from argus.capture.process.targets import find_libraries
from argus.model import calls
from argus.model.records import COLLECTIVE, LAUNCH

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not prices.MEASURABLE, reason="x86-64 only"),
]

TIMES = 37

LIBCUDA = r"""
__attribute__((naked)) int cuLaunchKernel(void) /* 7th to 11th argument on the stack */
{ __asm__("sub $0x38, %rsp\n mov %rdi, %rax\n push %rbx\n xor %eax, %eax\n pop %rbx\n add $0x38, %rsp\n ret"); }
__attribute__((naked)) int cuMemcpyAsync(void) /* its exit is probed, too */
{ __asm__("endbr64\n push %rbx\n xor %eax, %eax\n pop %rbx\n ret"); }
__attribute__((naked)) int cuMemcpyHtoDAsync_v2(void) /* the same, and nothing emulated while the stack is as it was */
{ __asm__("sub $8, %rsp\n nop\n mov $3, %eax\n add $8, %rsp\n ret"); }
__attribute__((naked)) int cuGraphLaunch(void) /* a loop that comes back to what would be cheap */
{ __asm__("mov $9, %ecx\n 1: nop\n dec %ecx\n jnz 1b\n xor %eax, %eax\n ret"); }
__attribute__((naked)) int cuLaunchCooperativeKernel(void) /* as cuLaunchKernel, but an argument is overwritten first */
{ __asm__("sub $8, %rsp\n mov $1, %edi\n nop\n xor %eax, %eax\n add $8, %rsp\n ret"); }
__attribute__((naked)) int cuLaunchKernel_ptsz(void) /* a cold part comes back */
{ __asm__("mov %rdi, %rax\n 1: nop\n test %rdi, %rdi\n je 3f\n xor %eax, %eax\n ret\n"
          ".section .text.cold,\"ax\"\n 3: inc %rdi\n jmp 1b\n .text"); }
__attribute__((naked)) int cuGraphLaunch_ptsz(void) /* a loop by an address in a register */
{ __asm__("mov $9, %ecx\n lea 1f(%rip), %rax\n 1: nop\n dec %ecx\n jz 2f\n jmp *%rax\n 2: xor %eax, %eax\n ret"); }
__attribute__((naked)) int cuMemsetD8Async(void)
{ __asm__("push %rbx\n xor %eax, %eax\n pop %rbx\n ret"); }
"""

LIBCUDART = r"""
/* A call inside a call: this one alone counts. dim3s are two arguments each; shared memory and stream on the stack. */
__attribute__((naked)) int cudaLaunchKernel(void)
{ __asm__("sub $0x48, %rsp\n nop\n xor %eax, %eax\n mov %r8, %r9\n mov 0x50(%rsp), %rax\n mov %rax, (%rsp)\n"
          "call cuLaunchKernel@PLT\n add $0x48, %rsp\n ret"); }
"""

LIBNCCL = r"""
__attribute__((naked)) int ncclAllReduce(void) /* exit probed, 7 arguments */
{ __asm__("sub $8, %rsp\n mov %rdi, %rax\n nop\n xor %eax, %eax\n add $8, %rsp\n ret"); }
"""

PROGRAM = r"""
#include <stdio.h>
#include <string.h>
struct dim3 { unsigned x, y, z; };
typedef unsigned u;
typedef unsigned long ul;
#define DRIVER void *, u, u, u, u, u, u, u, void *, void **, void **
int cuLaunchKernel(DRIVER), cuLaunchCooperativeKernel(DRIVER), cuLaunchKernel_ptsz(DRIVER);
int cuMemcpyAsync(ul, ul, ul, ul), cuMemcpyHtoDAsync_v2(ul, ul, ul, ul), cuMemsetD8Async(ul, ul, ul, ul);
int cuGraphLaunch(ul, ul), cuGraphLaunch_ptsz(ul, ul);
int cudaLaunchKernel(const void *, struct dim3, struct dim3, void **, ul, void *);
int ncclAllReduce(ul, ul, ul, ul, ul, ul, ul);
int main(void)
{
	struct dim3 grid = {2, 3, 4}, block = {5, 6, 7};
	puts("ready"); fflush(stdout);
	getchar();
	for (ul i = 0; i < TIMES; i++) {
		cuLaunchKernel((void *)i, 1, 2, 3, 4, 5, 6, 7, (void *)(i + 8), 0, 0);
		cuLaunchCooperativeKernel((void *)i, 1, 2, 3, 4, 5, 6, 7, (void *)(i + 8), 0, 0);
		cuLaunchKernel_ptsz((void *)i, 1, 2, 3, 4, 5, 6, 7, (void *)(i + 8), 0, 0);
		cuMemcpyAsync(i, 11, 12, 13);
		cuMemcpyHtoDAsync_v2(i, 21, 22, 23);
		cuMemsetD8Async(i, 31, 32, 33);
		cuGraphLaunch(i, 41);
		cuGraphLaunch_ptsz(i, 51);
		cudaLaunchKernel((void *)i, grid, block, 0, 61, (void *)(i + 62));
		ncclAllReduce(1, 2, i, 7, 0, 5, i + 6);
	}
	return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("later")
    flags = ["-O1", "-fno-omit-frame-pointer", "-fcf-protection=none"]
    for name, text in (("libcuda.so.1", LIBCUDA), ("libcudart.so.13", LIBCUDART), ("libnccl.so.2", LIBNCCL)):
        (folder / f"{name}.c").write_text(text)
        into = ["-o", str(folder / name), str(folder / f"{name}.c")]
        subprocess.run(["gcc", *flags, "-shared", "-fPIC", f"-Wl,-soname,{name}", *into], check=True)
    (folder / "program.c").write_text(PROGRAM)
    libraries = [str(folder / name) for name in ("libcudart.so.13", "libnccl.so.2", "libcuda.so.1")]
    binary = folder / "program"
    into = ["-o", str(binary), str(folder / "program.c"), *libraries, f"-Wl,-rpath,{folder}"]
    subprocess.run(["gcc", "-O1", f"-DTIMES={TIMES}", *into], check=True)
    return binary


@pytest.fixture(params=["multi", "perf"])
def probes(request: pytest.FixtureRequest) -> Iterator[Probes]:
    backend: Backend = request.param
    if backend == "multi" and kernel_version() < (6, 6):
        pytest.skip("this kernel has no multi links")
    made = Probes(backend=backend)
    yield made
    made.close()


def run(program: Path, probes: Probes, *, timed: bool = True) -> dict[str, Attachment]:
    """Runs the program with probes on. Returns what was attached, by the file's name."""
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        probes.add_target(process.pid)
        found = find_libraries(process.pid)
        attached = {library.path: probes.attach(library, process.pid, timed=timed) for library in found}
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    return {Path(path).name: attachment for path, attachment in attached.items()}


def of(symbol: str, events: NDArray[np.void]) -> NDArray[np.void]:
    found: NDArray[np.void] = events[events["call"] == calls.BY_SYMBOL[symbol].id]
    return found


def test_counts_and_arguments_are_the_programs(program: Path, probes: Probes) -> None:
    run(program, probes)
    launches, collectives = probes.launches.drain(), probes.collectives.drain()
    assert launches.dtype == LAUNCH
    assert collectives.dtype == COLLECTIVE
    symbols = {calls.CALLS[call].symbol: times for call, times in Counter(launches["call"].tolist()).items()}
    driver = {"cuLaunchKernel", "cuLaunchCooperativeKernel", "cuLaunchKernel_ptsz"}
    copies = {"cuMemcpyAsync": (12, 13), "cuMemcpyHtoDAsync_v2": (22, 23), "cuMemsetD8Async": (32, 33)}
    graphs = {"cuGraphLaunch": 41, "cuGraphLaunch_ptsz": 51}
    assert symbols == dict.fromkeys([*driver, *copies, *graphs, "cudaLaunchKernel"], TIMES)
    number = np.arange(TIMES)
    for symbol in driver:
        found = of(symbol, launches)
        assert (found["handle"] == number).all()
        assert (found["grid"] == [1, 2, 3]).all()
        assert (found["block"] == [4, 5, 6]).all()
        assert (found["bytes"] == 7).all()
        assert (found["stream"] == number + 8).all()
    for symbol, (size, stream) in copies.items():
        found = of(symbol, launches)
        assert (found["handle"] == number).all()
        assert (found["bytes"] == size).all()
        assert (found["stream"] == stream).all()
        assert (found["duration_ns"] > 0).all()
    assert (of("cuMemcpyHtoDAsync_v2", launches)["result"] == 3).all()
    for symbol, stream in graphs.items():
        found = of(symbol, launches)
        assert (found["handle"] == number).all()
        assert (found["stream"] == stream).all()
    found = of("cudaLaunchKernel", launches)
    assert (found["handle"] == number).all()
    assert (found["grid"] == [2, 3, 4]).all()
    assert (found["block"] == [5, 6, 7]).all()
    assert (found["bytes"] == 61).all()
    assert (found["stream"] == number + 62).all()
    assert len(collectives) == TIMES
    for name, value in {"count": number, "dtype": 7, "redop": 0, "comm": 5, "stream": number + 6}.items():
        assert (collectives[name] == value).all()
    assert (collectives["duration_ns"] > 0).all()
    counters = {counter.name: value for counter, value in probes.counters().items()}
    assert counters["NESTED"] == TIMES  # cuLaunchKernel in cudaLaunchKernel
    assert counters["HITS"] == 11 * TIMES
    hits = probes.hits()
    assert hits[calls.BY_SYMBOL["cuLaunchKernel"].id] == 2 * TIMES
    assert not sum(counters[name] for name in ("READ_FAULT", "EXIT_MISSED", "EXIT_UNMATCHED", "PENDING_FULL"))


def test_only_where_it_is_safe_is_a_probe_elsewhere(program: Path, probes: Probes) -> None:
    attached = run(program, probes)
    cheap, dear = probes.prices.entry["push"], probes.prices.entry[prices.STEPPED]
    assert cheap < dear / 2
    both = {call: price for each in attached.values() for call, price in each.prices.items()}
    exits = {call for each in attached.values() for call in each.exit_prices}
    price = {symbol: both[calls.BY_SYMBOL[symbol].id] for symbol in (
        "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuLaunchCooperativeKernel",
        "cuLaunchKernel_ptsz", "cuGraphLaunch_ptsz", "cuMemsetD8Async", "cudaLaunchKernel", "ncclAllReduce",
    )}  # fmt: skip
    limit = probes.prices.cheap + probes.prices.exit
    assert {symbol for symbol, ns in price.items() if ns <= limit} == {
        "cuLaunchKernel",
        "cuMemcpyAsync",
        "cuMemsetD8Async",
        "cudaLaunchKernel",
    }
    # Alone, entries of these two are cheap as well: nothing needs the stack pointer to be where it was.
    alone = {call: ns for each in attached.values() for call, ns in each.entry_prices.items()}
    for symbol in ("cuMemcpyHtoDAsync_v2", "ncclAllReduce"):
        assert calls.BY_SYMBOL[symbol].id in exits
        assert alone[calls.BY_SYMBOL[symbol].id] <= probes.prices.cheap


def test_an_exit_that_makes_the_entry_dear_is_left_out_where_nobody_needs_it(program: Path, probes: Probes) -> None:
    """A collective's: how long the CPU's call takes says little, and kernels are matched by it where they are timed."""
    attached = run(program, probes, timed=False)["libnccl.so.2"]
    call = calls.BY_SYMBOL["ncclAllReduce"].id
    assert call not in attached.exit_prices
    assert attached.prices[call] <= probes.prices.cheap
    collectives = probes.collectives.drain()
    assert len(collectives) == TIMES
    assert (collectives["count"] == np.arange(TIMES)).all()
    assert (collectives["duration_ns"] == -1).all()
    assert (np.diff(collectives["seq"].astype(np.int64)) == 1).all()
    # A copy's may be a wait for the GPU, so that it stays until the governor says otherwise.
    copy = calls.BY_SYMBOL["cuMemcpyHtoDAsync_v2"].id
    assert (of("cuMemcpyHtoDAsync_v2", probes.launches.drain())["duration_ns"] > 0).all()
    assert copy in {call for each in probes.attachments for call in each.exit_prices}
