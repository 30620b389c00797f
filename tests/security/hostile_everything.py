"""A hostile process, one of several kinds: ``hostile_everything.py KIND FOLDER LIBRARIES``. It prints ``ready``.

Each kind attacks one thing that Argus reads or opens, for as long as it lives. FOLDER is its own; LIBRARIES has the
fake CUDA. All are run beside honest jobs by ``scripts/hostile``.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

FOLDER, LIBRARIES = Path(sys.argv[2]), Path(sys.argv[3])
CUDA = "libcuda.so.1"
_SOFT, _HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
_MOST_OPEN = 20_256 if _HARD == resource.RLIM_INFINITY else min(_HARD, 20_256)
FILES = _MOST_OPEN - 256  # a mapping of Python's keeps a descriptor open
STATES = 1 << 16
PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def _ready() -> None:
    print("ready", flush=True)


def _cuda(name: str = CUDA) -> ctypes.CDLL:
    """The fake driver, from a copy of this process's own."""
    own = FOLDER / name
    if not own.exists():
        shutil.copy(LIBRARIES / CUDA, own)
    return ctypes.CDLL(str(own))


def _executable(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    finally:
        os.close(fd)


def files() -> None:
    """20,000 mapped files that look like libraries, some of which are exchanged for others all the time."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(_SOFT, _MOST_OPEN), _HARD))
    _cuda()
    image = (LIBRARIES / CUDA).read_bytes()[: 3 * PAGE]
    held = []
    (FOLDER / "many").mkdir()
    for number in range(FILES):
        path = FOLDER / "many" / f"lib{number}.so"
        path.write_bytes(image if number % 50 == 0 else image[:64] + number.to_bytes(8, "little") * 8)
        held.append(_executable(path))
        path.unlink()
        if number == 1000:
            _ready()  # the others come while it is traced
    while True:
        time.sleep(0.5)
        place = random.randrange(FILES)
        path = FOLDER / "many" / "again.so"
        path.write_bytes(image[:64] + os.urandom(512))
        held[place] = _executable(path)
        path.unlink()


def lists() -> None:
    """A chain of thread states that are none, behind those of its own interpreter; and counters without sense."""
    interp_head, threads_head, thread_next, thread_frame = map(int, os.environ["OFFSETS"].split(","))
    runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    word = ctypes.c_uint64
    interpreter = word.from_address(runtime + interp_head).value
    state = word.from_address(interpreter + threads_head).value
    while following := word.from_address(state + thread_next).value:
        state = following
    size = 512
    forged = mmap.mmap(-1, STATES * size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(forged))
    for number in range(STATES):
        at = base + number * size
        word.from_address(at + thread_next).value = base + (number * 7919 + 1) % STATES * size
        word.from_address(at + thread_frame).value = at
    word.from_address(state + thread_next).value = base
    _ready()
    while True:
        sum(range(10_000))


def links() -> None:
    """Its library's name is now a file, now a link to a file of root's, now a pipe; so is what lies beside it."""
    torch = FOLDER / "torch" / "lib"
    torch.mkdir(parents=True)
    library = torch / "libtorch_cpu.so"
    shutil.copy(LIBRARIES / CUDA, library)
    shutil.copy(LIBRARIES / CUDA, torch / CUDA)
    held = [_executable(library), ctypes.CDLL(str(torch / CUDA))]
    version, spare = torch.parent / "version.py", FOLDER / "spare"
    perf = Path(f"/tmp/perf-{os.getpid()}.map")
    targets = [os.environ["TREASURE"], "/dev/zero", "/dev/full", "/etc/shadow"]
    _ready()
    turn = 0
    while held:
        turn += 1
        for place in (library, torch / CUDA, version, perf):
            spare.unlink(missing_ok=True)
            kind = (turn + hash(place)) % 4
            if kind == 0:
                os.mkfifo(spare, 0o666)
            elif kind == 3:
                shutil.copy(LIBRARIES / CUDA, spare)
            else:
                spare.symlink_to(targets[turn % len(targets)])
            os.rename(spare, place)
        time.sleep(0.002)


def flood() -> None:
    """Calls as fast as it can."""
    library = _cuda()
    _ready()
    while True:
        library.cuCtxSynchronize()


def names() -> None:
    """Kernels whose names would fill the memory of whoever reads them, and never the same twice; their handles are."""
    library = _cuda()
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _must(library.cuInit(0))
    _must(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _must(library.cuCtxSetCurrent(context))
    letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    bomb = "1A1BIS_S_E" + "".join(f"S0_IS{letters[k]}_S{letters[k]}_E" for k in range(1, 30))
    _ready()
    number = 0
    while True:
        _must(library.cuModuleLoadData(ctypes.byref(module), b"image"))
        for _ in range(64):
            number += 1
            name = f"_Z{len(str(number)) + 1}f{number}{bomb}" if number % 2 else f"_RNvC{3000}{number:x<3000}1f"
            _must(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            _must(library.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None))
        _must(library.cuCtxSynchronize())
        _must(library.cuModuleUnload(module))
        time.sleep(0.05)


def _must(result: int) -> None:
    if result:
        raise SystemExit(f"the driver refuses a call: {result}")


def memory() -> None:
    """The memory that the CUPTI helper shares with Argus is written to at random, while Argus reads it."""
    _cuda().cuInit(0)
    where = None
    until = time.monotonic() + 20
    while where is None and time.monotonic() < until:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:argus-cupti" in line and " 00000000 " in line:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                where = begin, end
        time.sleep(0.1)
    if where is None:
        raise SystemExit("the helper shares no memory")
    _ready()
    begin, end = where
    random.seed(7)
    while True:
        for _ in range(200):
            at = begin + random.choice((0, 32768, 65536, 0)) + 4 * random.randrange(200)
            if at + 8 <= end:
                ctypes.c_uint32.from_address(at).value = random.choice(
                    (0, 1, 2, 3, 5, 0xFFFFFFFF, random.getrandbits(32))
                )
        time.sleep(0.001)


def parents() -> None:
    """Repositories above honest jobs, in a folder that everybody may write to: another's commit, links that lead to
    root's files, to themselves and to a pipe, and a name with a NUL."""
    held = _cuda()
    git, treasure = Path(os.environ["SHARED"]) / ".git", os.environ["TREASURE"]
    (FOLDER / ".git").mkdir()
    (FOLDER / ".git/HEAD").symlink_to(treasure)  # its own repository, of a file that it may not read
    _ready()
    for turn in itertools.cycle(range(5)):
        shutil.rmtree(git, ignore_errors=True)
        git.unlink(missing_ok=True)
        if turn == 0:
            git.mkdir()
            (git / "HEAD").write_text("1" * 40)
        elif turn == 1:
            git.mkdir()
            (git / "HEAD").symlink_to(treasure)
        elif turn == 2:
            (FOLDER / "HEAD").write_text("ref: refs/heads/x")
            (FOLDER / "commondir").write_bytes(b"a\0b")
            git.write_text(f"gitdir: {FOLDER}\n")
        elif turn == 3:
            git.symlink_to(git)
        else:
            os.mkfifo(git)
        time.sleep(0.05)
    del held


def truncation() -> None:
    """Its mapped files are cut short, and grow again, while they are read."""
    library = FOLDER / "libnccl.so.2"
    shutil.copy(LIBRARIES / "libnccl.so.2", library)
    whole = library.read_bytes()
    held = [_cuda(), _executable(library)]
    library.chmod(0o755)
    _ready()
    with library.open("r+b") as file:
        while held:
            for size in (64, 4096, len(whole), 1 << 32):
                file.truncate(size)
                time.sleep(0.001)
            file.seek(0)
            file.write(whole)
            file.truncate(len(whole))
            file.flush()


KINDS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (files, lists, links, flood, names, memory, truncation, parents)
}


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    KINDS[sys.argv[1]]()


def _end_with_parent() -> None:
    """Whoever started it was killed."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
