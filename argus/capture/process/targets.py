"""From a PID to what can be traced in it: libraries and their functions, and the job, rank and host it stands for.

Everything comes from /proc: the process is neither stopped nor changed.
"""

from __future__ import annotations

import itertools
import operator
import os
import pwd
import re
import select
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

from argus.capture.library_room import LibraryRoom
from argus.capture.process import nccl, symbol_cache
from argus.capture.process.elf import Beyond, NotElf, Place
from argus.capture.process.mapped import Allowance, File, Lasting, Reference, key_of, lasting, open_mapped, owner_text
from argus.capture.process.mapped import Mapping as Mapping
from argus.capture.process.pytorch import GroupLayout, Layout, layout_of
from argus.capture.reader import left_out, reader
from argus.model import calls
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.ranks import HIGHEST_RANK
from argus.model.units import RANKS_LISTED
from argus.system import redact
from argus.system.proc import (
    POD,
    container_of,
    field_of,
    lines_of,
    number,
    numbers,
    owner_of,
    read_cgroup,
    read_file,
    stat_of,
    user_of,
)

PROC = Path("/proc")

# One function that each library exports in every version: cheap to look for before the whole table is.
TORCH_PYTHON = "libtorch_python"
TORCH = ("libtorch_cpu", TORCH_PYTHON)
CUBLAS = ("libcublas", "libcublasLt")
NVTX = "libnvToolsExt"
"""Also what contains its functions under another name: libnvtx3interop, PyTorch's libtorch_python since 2.5."""
_SENTINELS: dict[str, tuple[str, ...]] = {
    "libcuda": ("cuLaunchKernel",),
    "libcudart": ("cudaLaunchKernel",),
    "libnccl": ("ncclAllReduce",),
    CUBLAS[0]: ("cublasGemmEx",),
    CUBLAS[1]: ("cublasLtMatmul",),
    TORCH[0]: calls.symbols_of("backward_begin"),
    TORCH[1]: calls.symbols_of("backward"),
    NVTX: ("nvtxRangePushA",),
}
"""Functions of which a library has one."""
_LAYERS = {
    "libcuda": calls.Layer.DRIVER,
    "libcudart": calls.Layer.RUNTIME,
    "libnccl": calls.Layer.NCCL,
    **dict.fromkeys(CUBLAS, calls.Layer.CUBLAS),
    **dict.fromkeys(TORCH, calls.Layer.TORCH),
    NVTX: calls.Layer.NVTX,
}
_LOOKED_FOR = tuple(
    dict.fromkeys((*itertools.chain.from_iterable(_SENTINELS.values()), *(call.symbol for call in calls.CALLS)))
)
_MAPS_LINE = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<perms>\S+) (?P<offset>[0-9a-f]+) (?P<device>\S+) (?P<inode>\d+) +"
    r"(?P<path>/.*)$"
)
_DELETED = " (deleted)"
EXEC_TRIES, EXEC_S = 20, 0.005
"""How often, and how long after one another, a process is looked at that is being executed: the kernel gives it
arguments and environment late, on a busy machine milliseconds after the file descriptors that end there were closed."""
_CPUCLOCK_SCHED = 2
"""The clock of a process's CPU time is numbered by the process and this (kernel/time/posix-cpu-timers.c)."""


FileKey = tuple[str, int, int, int]
"""Device and inode (of a file of an overlay as /proc/PID/maps shows them, else as ``stat`` does), size in bytes, time
of change in ns."""


@dataclass(frozen=True)
class Library:
    """One file that holds traceable functions.

    Attributes:
        path: As the process sees it.
        file: It: what was parsed and what is probed. A ``File`` where no reader process has parsed it.
        device, inode: As /proc/PID/maps shows them.
        stamp: Size and time of change: file systems give a freed inode to the next file.
        deleted: The file was replaced or removed after it was mapped.
        offsets: File offset of each function found, by symbol.
        roles: Which of libcuda, libcudart, libnccl, libcublas, libcublasLt, libtorch_cpu, libtorch_python and
            libnvToolsExt it contains.
        text_bytes: Size of its code.
        layout: Where this PyTorch's objects keep things; None: not known, or not PyTorch.
        pid: The process that it was found in, for which the reader process reads it; 0: none.
    """

    path: str
    file: Reference
    device: str
    inode: int
    deleted: bool
    offsets: dict[str, int]
    roles: tuple[str, ...]
    stamp: tuple[int, int] = (0, 0)
    text_bytes: int = 0
    layout: Layout | None = None
    pid: int = field(default=0, compare=False)

    @cached_property
    def on_gpu(self) -> bool:
        """Whether who maps it may use a GPU: launchers and programs on CPUs map PyTorch, cuBLAS and NVTX, too."""
        return not set(self.roles) <= {*TORCH, *CUBLAS, NVTX}

    @cached_property
    def key(self) -> FileKey:
        """What distinguishes two files. Overlays of several containers may show one file below them: the kernel puts
        probes into that one."""
        status = self.file.status
        overlay = self.file.on_overlay
        device = self.device if overlay else f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        return (device, self.inode if overlay else status.st_ino, *self.stamp)

    @property
    def open_path(self) -> str:
        """By which this process, and the kernel on its behalf, can open it."""
        return self.file.path

    @property
    def linked_statically(self) -> tuple[str, ...]:
        """Roles it contains under another library's or a program's name."""
        name = Path(self.path).name
        return tuple(role for role in self.roles if not name.startswith(role + ".so"))

    def describe(self) -> str:
        """One line for people: file, what it holds, how many functions."""
        notes = [f"{len(self.offsets)} functions"]
        if self.linked_statically:
            notes.append("contains " + ", ".join(self.linked_statically))
        if self.deleted:
            notes.append("deleted on disk")
        return f"{self.shown_path} ({', '.join(notes)})"

    @property
    def shown_path(self) -> str:
        """The path for people and tables: bytes that are no UTF-8, and what would move a terminal's cursor, escaped."""
        text = os.fsencode(self.path).decode(errors="backslashreplace")
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Identity:
    """What a process is to its job. -1 and 0 mean unknown where noted.

    Attributes:
        rank: Global rank; -1: unknown.
        world_size: Ranks of the job; 0: unknown.
        local_rank: Rank inside the node; -1: unknown.
        job: Name of the job; empty: unknown.
        launcher: torchrun, slurm, openmpi, pmi, kubernetes or unknown.
        lineage: What processes started together share: the rendezvous address, the launcher's run and the world size.
        uid: User that it runs as, as this host numbers users; -1: unknown. No process can choose it, unlike the above.
        container: What it runs in: its pod, Slurm's job or PID namespace; empty: the host.
    """

    rank: int = -1
    world_size: int = 0
    local_rank: int = -1
    job: str = ""
    launcher: str = "unknown"
    lineage: str = ""
    uid: int = -1
    container: str = ""

    @property
    def owner(self) -> tuple[int, str]:
        """What processes of one job have in common, whatever they say of themselves."""
        return self.uid, self.container


_ON_GPU = operator.attrgetter("on_gpu")
"""Asked for each process in each turn."""


@dataclass
class Target:
    """A process to trace. ``pidfd`` stays the same process whatever becomes of its PID."""

    pid: int
    start_ticks: int
    exe: str
    command: str
    """Its command line, without what looks like a secret."""
    identity: Identity
    libraries: list[Library] = field(default_factory=list)
    pidfd: int = -1

    @property
    def on_gpu(self) -> bool:
        """Whether it maps a library of the GPU."""
        return any(map(_ON_GPU, self.libraries))

    def has(self, role: str) -> bool:
        """Whether it maps a library of this role."""
        return any(role in library.roles for library in self.libraries)

    def alive(self) -> bool:
        """Whether the very process that was opened still runs, even if its PID was given to another."""
        if self.pidfd < 0:
            return same_process(self.pid, self.start_ticks)
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        return not ended.poll(0)

    def close(self) -> None:
        """Lets go of the process."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def started_unix(self) -> float:
        """Start time, seconds since the epoch."""
        return boot_time() + self.start_ticks / os.sysconf("SC_CLK_TCK")


def open_target(pid: int, *, any_program: bool = False, tree: Tree | None = None, hints: bool = True) -> Target:
    """Looks at a running process and finds its libraries.

    Args:
        pid: The process.
        any_program: Take also one that maps none of the libraries, unless it is the launcher of others that count.
        tree: What is below it, for who opens many; None: as it is now.
        hints: Whether the reason for which one is refused says which of its children use a GPU.

    Raises:
        ArgusError: There is no such process, it is a kernel thread or a zombie, it may not be looked at, or it maps
            none of the libraries.
    """
    target = inspect(pid)
    try:
        return _with_libraries(target, any_program, tree or Tree(), hints)
    except BaseException:
        target.close()
        raise


def _with_libraries(target: Target, any_program: bool, tree: Tree, hints: bool) -> Target:
    """As ``open_target`` has it."""
    pid = target.pid
    try:
        target.libraries = find_libraries(pid)
    except PermissionError as reason:
        raise _forbidden(pid) from reason
    except (FileNotFoundError, ProcessLookupError) as reason:
        raise _vanished(pid) from reason
    except reader.Unreadable:  # its files do not answer: what it does is seen all the same
        target.libraries = Libraries()
    if not target.on_gpu:
        may_be = any_program or (bool(target.libraries) and target.identity.rank >= 0)
        helpers = tree.helpers(pid) if may_be or hints else Some()
        ranks = tree.ranks(pid) if may_be and target.identity.rank < 0 else Some()
        if not helpers.number and not ranks.number and may_be:
            return target
        if any_program and not helpers.number:
            raise ArgusError(
                f"process {pid} ({Path(target.exe).name}) is a launcher: the ranks are its children ({ranks})",
                "Add --children",
                EXIT_UNAVAILABLE,
            )
        if target.libraries.unread and not helpers.number:
            raise ArgusError(
                f"process {pid} ({Path(target.exe).name}) cannot be traced: not all files that it maps were read, and "
                "none that was is libcuda, libcudart or libnccl",
                "Try again. If its user's processes map very many files, raise the limit (ulimit -Hn)",
                EXIT_UNAVAILABLE,
            )
        hint = "Trace a process that uses the GPU: `argus trace --all-gpu` finds them"
        if helpers.number:
            hint = f"Its children do ({helpers}): add --children"
        raise ArgusError(
            f"process {pid} ({Path(target.exe).name}) maps none of libcuda, libcudart and libnccl",
            hint,
            EXIT_UNAVAILABLE,
        )
    return target


def runs_as_another(target: Target) -> bool:
    """Whether a process runs as another user than it did when it was looked at first, if that is known."""
    if target.identity.uid < 0:
        return False
    try:
        # Of a process that cannot be dumped the files of /proc are root's, whoever it runs as.
        if os.stat(f"{PROC}/{target.pid}").st_uid == target.identity.uid:
            return False
    except OSError:
        return False
    return user_of(target.pid) not in (-1, target.identity.uid)


def identity_of(pid: int) -> Identity:
    """What a process's environment says it is; nothing where it may not be read, or the process has ended."""
    try:
        return identify(read_environment(pid))
    except OSError:
        return Identity()


def inspect(pid: int, *, wait: bool = True) -> Target:
    """Who a process is, without its libraries.

    Args:
        pid: The process.
        wait: Whether to wait for one that is being executed, for 0.1 s at most. An exec may take as long as a file
            system of others wants, so that a loop which others depend on must not.

    Raises:
        ArgusError: There is no such process, it is a kernel thread or a zombie, is being executed, or may not be looked
            at.
    """
    try:
        # Opened first: whatever is read afterwards is checked to be of this very process.
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as reason:
        raise _absent(pid) from reason
    except OSError as reason:
        owner = _thread_group(pid)
        if owner is not None and owner != pid:
            raise ArgusError(f"{pid} is a thread of process {owner}", f"Trace the process: --pid {owner}") from reason
        raise _absent(pid) from reason
    try:
        stat = _stat(pid)
        if stat is None:
            raise _absent(pid)
        state, start_ticks = stat
        if state in "ZX":
            raise ArgusError(f"process {pid} has ended and waits for its parent (zombie)", "", EXIT_UNAVAILABLE)
        try:
            exe = os.readlink(PROC / str(pid) / "exe")
        except FileNotFoundError as reason:
            if same_process(pid, start_ticks):
                raise ArgusError(f"process {pid} is a kernel thread", "", EXIT_UNAVAILABLE) from reason
            raise _vanished(pid) from reason
        command_line, environment = _started_with(pid, wait)
        cgroup = read_cgroup(pid)
        identity = owned(identify(environment, command_line, cgroup), pid, cgroup)
        if not same_process(pid, start_ticks):
            raise _vanished(pid)
    except PermissionError as reason:
        os.close(pidfd)
        raise _forbidden(pid) from reason
    except (FileNotFoundError, ProcessLookupError) as reason:
        os.close(pidfd)
        raise _vanished(pid) from reason
    except BaseException:
        os.close(pidfd)
        raise
    command = redact.command_line([w.decode(errors="replace") for w in command_line.rstrip(b"\0").split(b"\0")])
    return Target(pid, start_ticks, exe.removesuffix(_DELETED), command, identity, pidfd=pidfd)


def _absent(pid: int) -> ArgusError:
    return ArgusError(
        f"there is no process {pid}", "`argus trace --all-gpu` finds those that use a GPU", EXIT_UNAVAILABLE
    )


def _vanished(pid: int) -> ArgusError:
    return ArgusError(f"process {pid} ended while Argus inspected it", "", EXIT_UNAVAILABLE)


def _forbidden(pid: int) -> ArgusError:
    try:
        uid = os.stat(PROC / str(pid)).st_uid
        owner = pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        owner = "another user"
    if os.geteuid() == 0:
        return ArgusError(
            f"not even root may inspect process {pid} here",
            "A security module or the container forbids it",
            EXIT_UNAVAILABLE,
        )
    return ArgusError(
        f"process {pid} belongs to {owner} and cannot be inspected", "Run Argus with sudo", EXIT_UNAVAILABLE
    )


def cpu_ns(pid: int) -> int:
    """CPU time of all threads that a process has and had, to the nanosecond: one system call shows whether it has run.
    -1: not known."""
    try:
        return time.clock_gettime_ns(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return -1


def queued_ns(pid: int) -> int:
    """For how long a process's first thread could have run and no CPU was free, so far, ns; 0: not known."""
    try:
        return int(read_file(f"{PROC}/{pid}/schedstat").split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time (clock ticks since boot), fields 3 and 22 of /proc/PID/stat."""
    try:
        fields = stat_of(f"{PROC}/{pid}")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (fields[0].decode("ascii", "replace"), number(fields[19])) if len(fields) > 19 else None


def same_process(pid: int, start_ticks: int) -> bool:
    """Whether PID is still the process that started then."""
    stat = _stat(pid)
    return stat is not None and stat[1] == start_ticks and stat[0] not in "ZX"


def start_ticks(pid: int) -> int | None:
    """When a process started (clock ticks since boot), or None if it has ended."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else stat[1]


def parent_of(pid: int) -> int:
    """The parent of a process; 0: it has ended."""
    try:
        fields = stat_of(f"{PROC}/{pid}")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return max(number(fields[1]), 0) if len(fields) > 1 else 0


def numbers_of(pid: int) -> tuple[int, ...]:
    """The numbers of a process: here, and in every PID namespace that has one for it."""
    try:
        return (pid, *numbers(field_of(read_file(f"{PROC}/{pid}/status"), b"NSpid")))
    except OSError:
        return (pid,)


def _thread_group(pid: int) -> int | None:
    try:
        group = number(field_of(read_file(f"{PROC}/{pid}/status"), b"Tgid"))
    except OSError:
        return None
    return group if group > 0 else None


@lru_cache(maxsize=1)
def boot_time() -> float:
    """When this machine was started, seconds since the epoch."""
    for line in lines_of(read_file(f"{PROC}/stat")):
        if line.startswith(b"btime "):
            return float(line.split()[1])
    return 0.0


def _of_memory(pid: int, name: str) -> bytes:
    """A file of /proc/PID whose content lies in the process's memory; empty where that does not answer.

    Raises:
        OSError: The process has ended, or may not be looked at.
    """
    if not reader.shared.on:
        return (PROC / str(pid) / name).read_bytes()
    try:
        return reader.proc_file(pid, name)
    except reader.Unreadable:
        return b""


def _started_with(pid: int, wait: bool) -> tuple[bytes, dict[str, str]]:
    """Command line and environment of a process, empty if it has removed them.

    Raises:
        ArgusError: It is being executed, and has neither yet.
    """
    for left in reversed(range(EXEC_TRIES if wait else 1)):
        if not _is_executed(pid):
            return _of_memory(pid, "cmdline"), read_environment(pid)
        if left:
            time.sleep(EXEC_S)
    raise ArgusError(f"process {pid} is being executed", "Try again in a moment", EXIT_UNAVAILABLE)


def _is_executed(pid: int) -> bool:
    """Whether a process is in the midst of an exec: its new memory has no place for an environment yet (proc(5): field
    51 of /proc/PID/stat)."""
    fields = stat_of(f"{PROC}/{pid}")
    return len(fields) > 48 and fields[48] == b"0"


def read_environment(pid: int) -> dict[str, str]:
    """The environment the process was started with."""
    raw = _of_memory(pid, "environ")
    pairs = (item.split(b"=", 1) for item in raw.split(b"\0") if b"=" in item)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in pairs}


def program_of(pid: int) -> bytes:
    """What changes with each exec: when the process started, and where code and stack begin (proc(5): fields 22 and 26
    to 28 of /proc/PID/stat). Empty: it has ended.

    Not the auxiliary vector, nor the memory: whoever reads those waits for an exec, which may wait for a dead file
    system."""
    try:
        fields = stat_of(f"{PROC}/{pid}")
        return b" ".join([*fields[19:20], *fields[23:26]])
    except OSError:
        return b""


def read_program(pid: int) -> bytes:
    """The first bytes of the file that a process executes.

    Raises:
        OSError: The process has ended, or may not be looked at; the file does not answer.
    """
    if reader.shared.on:
        return reader.proc_file(pid, "exe")
    with open(PROC / str(pid) / "exe", "rb") as file:
        return file.read(reader.PROGRAM_BYTES)


# Variables by launcher: rank, world size, local rank. The first launcher whose rank variable is a number wins; torchrun
# comes first because it runs inside the others.
_LAUNCHERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",)),
    (
        "openmpi",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ),
    ("mvapich", ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",)),
    ("pmi", ("PMI_RANK", "PMIX_RANK"), ("PMI_SIZE", "PMIX_SIZE"), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
    ("slurm", ("SLURM_PROCID",), ("SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",)),
)
_SHARED_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
MAX_RANK = HIGHEST_RANK
"""A larger rank or world size is a mistake in the environment."""
MAX_JOB_NAME = 200


def owned(identity: Identity, pid: int, cgroup: str = "") -> Identity:
    """An identity with whom the process belongs to.

    Args:
        identity: What its environment says.
        pid: The process.
        cgroup: /proc/PID/cgroup.
    """
    return replace(identity, uid=user_of(pid), container=container_of(pid, cgroup))


def _number(environment: dict[str, str], names: Iterable[str]) -> int:
    """The first of these variables that is a sensible number; -1: none."""
    for name in names:
        value = environment.get(name, "")
        if value.isascii() and value.isdigit() and len(value) < 10 and int(value) <= MAX_RANK:
            return int(value)
    return -1


def identify(environment: dict[str, str], command_line: bytes = b"", cgroup: str = "") -> Identity:
    """Rank and job from the launcher's environment, the cgroup and the command line.

    Args:
        environment: The process's environment.
        command_line: /proc/PID/cmdline, for a name of last resort.
        cgroup: /proc/PID/cgroup, for the pod of a Kubernetes job.
    """
    launcher, rank, world, local = "unknown", -1, 0, -1
    for name, rank_names, world_names, local_names in _LAUNCHERS:
        value = _number(environment, rank_names)
        size = max(_number(environment, world_names), 0)
        if value < 0 or (size and value >= size):
            continue
        launcher, rank, world, local = name, value, size, _number(environment, local_names)
        break
    pod = POD.search(cgroup)
    if launcher == "unknown" and (pod or environment.get("KUBERNETES_SERVICE_HOST")):
        launcher = "kubernetes"
    shared = (environment.get(name, "") for name in _SHARED_VARIABLES)
    lineage = "/".join((*shared, str(world)))
    return Identity(rank, world, local, _clean(_job_name(environment, command_line, pod)), launcher, lineage)


def _clean(name: str) -> str:
    """A name fit to be printed: another program chose it, and may have put anything in it."""
    printable = "".join(character if character.isprintable() else "?" for character in name)
    return printable if len(printable) <= MAX_JOB_NAME else printable[: MAX_JOB_NAME - 1] + "…"


_RANDOM_ID = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{32}", re.IGNORECASE)
"""A UUID: what torchrun calls a run that was given no --rdzv-id (torch/distributed/run.py, --standalone)."""
_WRAPPERS = ("cProfile", "profile", "pdb", "trace", "coverage", "debugpy", "torch.distributed.run", "accelerate.")
"""Modules for ``python -m`` that run another program, which their arguments name."""


def _job_name(environment: dict[str, str], command_line: bytes, pod: re.Match[str] | None) -> str:
    """The first of: Slurm's job, the run id that torchrun was given, JOB_NAME and other schedulers' ids, the pod, the
    script. An id that torchrun made up is no name: the script is, the same on all ranks and nodes."""
    if environment.get("SLURM_JOB_ID"):
        name = environment.get("SLURM_JOB_NAME", "")
        return f"{name}-{environment['SLURM_JOB_ID']}" if name else f"slurm-{environment['SLURM_JOB_ID']}"
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    made_up = _RANDOM_ID.fullmatch(run_id) is not None
    if run_id not in ("", "none") and not made_up:
        return run_id
    for variable in ("JOB_NAME", "PBS_JOBID", "LSB_JOBID"):
        if environment.get(variable):
            return environment[variable]
    if pod and not made_up:  # nodes of one job are pods of their own
        return f"pod-{pod.group(1).replace('_', '-')}"
    return script_name([word.decode(errors="replace") for word in command_line.split(b"\0") if word])


def script_name(words: list[str]) -> str:
    """What a command line runs, for people: ``train`` of ``python -u /srv/train.py --lr 1`` and of ``python -m
    pkg.train``; without a script, the program. Empty: no words."""
    if not words:
        return ""
    program = Path(words[0]).name
    rest = iter(words[1:]) if program.startswith(("python", "pypy")) else iter(())
    for word in rest:
        if word == "-m":
            module = next(rest, "")
            if module and not module.startswith(_WRAPPERS):
                return module.removesuffix(".__main__").rpartition(".")[2]
            break
        if word == "-c":
            break
        if word in ("-W", "-X", "-Q", "--check-hash-based-pycs"):
            next(rest, "")
        elif not word.startswith("-"):
            return Path(word).stem
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    return program if script is None else Path(script).stem


def executable_mappings(pid: int) -> list[Mapping]:
    """The executable file mappings of a process."""
    mappings: list[Mapping] = []
    # A file's name may hold a carriage return, which ends no line: the kernel escapes what does.
    for line in reader.maps(pid, executable=True).decode("utf-8", "surrogateescape").split("\n"):
        match = _MAPS_LINE.match(line)
        if not match or "x" not in match["perms"] or match["inode"] == "0":
            continue
        path = match["path"]
        deleted = path.endswith(_DELETED)
        mapping = Mapping(
            int(match["start"], 16),
            int(match["end"], 16),
            int(match["offset"], 16),
            match["device"],
            int(match["inode"]),
            path.removesuffix(_DELETED) if deleted else path,
            deleted,
        )
        mappings.append(mapping)
    return mappings


def mapped_pages(pid: int) -> bytes:
    """How much a process has mapped, as the kernel writes it: mostly another number once it has loaded a library, for a
    hundredth of what reading its mappings takes.

    Raises:
        OSError: The process has ended.
    """
    return read_file(f"{PROC}/{pid}/statm").partition(b" ")[0]


def mappings_signature(pid: int) -> int:
    """A number that changes when a process maps other executable files.

    Raises:
        OSError: The process has ended, or may not be looked at.
    """
    return hash(reader.maps(pid, executable=True))


def maps_cuda(pid: int) -> bool:
    """Whether a process maps libcuda (false also where it may not be looked at)."""
    try:
        return any(Path(m.path).name.startswith("libcuda.so") for m in executable_mappings(pid))
    except (OSError, ValueError):  # also where its mappings make no sense
        return False


class Libraries(list[Library]):
    """Libraries of a process.

    Attributes:
        unread: Files that were not read: the process maps too many new ones at once, or its owner's map too many. A
            later call reads them.
    """

    unread = 0


MAX_FILES = 4096
"""Files of a process that are considered: a PyTorch job maps some hundred."""
_new_files = Allowance(burst=1024, per_second=32)
"""A file takes 1 to 3 ms."""


def find_libraries(pid: int, allowance: Allowance = _new_files) -> Libraries:
    """The files a process maps that define functions Argus hooks, whatever they are called.

    A statically linked runtime or NCCL is found by its symbols in any mapped file (PyTorch builds, MPI programs).

    Args:
        pid: The process.
        allowance: How many files of it are parsed that were not before.

    Raises:
        OSError: The process ended, or may not be looked at.
    """
    if reader.shared.on and allowance is _new_files:
        return reader.checked(reader.shared.ask("libraries", pid), partial(_of_reader, pid))  # type: ignore[no-any-return]
    by_start: list[tuple[int, Library]] = []
    # A file may be mapped in several parts; the first stands for it.
    by_file: dict[tuple[str, int], Mapping] = {}
    for mapping in executable_mappings(pid):
        by_file.setdefault((mapping.device, mapping.inode), mapping)
    likely_first = sorted(by_file.values(), key=lambda mapping: _LIKELY.search(mapping.path) is None)
    unread, owner = max(len(likely_first) - MAX_FILES, 0), owner_text(pid)
    for mapping in likely_first[:MAX_FILES]:
        key = key_of(pid, mapping)
        known = None if key is None else _hooks_by_file.get(lasting(key, owner))
        if known is _REFUSED:
            left_out.count_once("files_refused", pid, key)
        if known is _NO_HOOKS or known is _REFUSED:
            continue
        try:
            file = open_mapped(pid, mapping)
        except OSError:
            continue
        hooks = _hooks_by_file.get(lasting(file.key, owner))
        if hooks is None:
            if not allowance.take(pid):
                unread += 1
                continue
            hooks = _hooks(file, mapping.path, owner)
        elif hooks[0] and not symbol_cache.confirmed(file, hooks[1], hooks[3]):
            hooks = _hooks(file, mapping.path, owner)
        if hooks is _REFUSED:
            left_out.count_once("files_refused", pid, file.key)
        roles, offsets, text_bytes, _ = hooks
        if roles:
            library = Library(
                mapping.path,
                file,
                mapping.device,
                mapping.inode,
                mapping.deleted,
                offsets,
                roles,
                (file.status.st_size, file.status.st_ctime_ns),
                text_bytes,
                layout_of(pid, mapping) if TORCH[0] in roles else None,
                pid,
            )
            by_start.append((mapping.start, library))
    libraries = Libraries(library for _, library in sorted(by_start, key=lambda item: item[0]))
    libraries.unread = unread
    return libraries


MOST_FIELD = (1 << 31) - 1
"""Offsets in an object of a library's, as code of x86_64 can have them. The communicator of NCCL 2.30 has more than a
megabyte. What is said to lie farther is not known."""


_room = LibraryRoom()
"""What this process may note of what others map."""
_offsets_of: weakref.WeakKeyDictionary[Reference, dict[str, int]] = weakref.WeakKeyDictionary()
"""Of files that the reader process has parsed: processes of a node map the same ones, and share them."""
_NAMES = {name: name for name in _LOOKED_FOR}


def _shared_offsets(file: Reference, offsets: dict[str, int]) -> dict[str, int]:
    """The same as were noted of a file before, or these."""
    before = _offsets_of.get(file)
    if before == offsets:
        return before
    _offsets_of[file] = offsets
    return offsets


def _of_reader(pid: int, answer: reader.Answer) -> Libraries:
    """What the reader process has found in a process."""
    rows = answer.what["libraries"]
    if len(rows) != len(answer.fds):
        raise reader.Malformed("libraries without descriptors")
    libraries, owner, over = Libraries(), owner_of(pid), 0
    for row in rows:
        mode, inode, device, links, uid, gid, size, ctime_ns, mtime_ns = reader.integers(row["status"])
        status = SimpleNamespace(
            st_mode=mode,
            st_ino=inode,
            st_dev=device,
            st_nlink=links,
            st_uid=uid,
            st_gid=gid,
            st_size=size,
            st_ctime_ns=ctime_ns,
            st_mtime_ns=mtime_ns,
        )
        file = Reference.received(answer.fds.pop(0), status, bool(row["on_overlay"]))
        if not _room.has_file(file, owner):
            over += 1
            continue
        names = list(row["offsets"])
        offsets = reader.integers([row["offsets"][name] for name in names], 1 << 63)
        layout = None
        if row["layout"] is not None:
            sizes, numel, group = row["layout"]
            fields = reader.integers([sizes, numel, *(group or ())])
            if max(fields) <= MOST_FIELD:
                layout = Layout(sizes, numel, None if group is None else GroupLayout(*fields[2:]))
        offset = row["rank_offset"]
        if offset is not None:
            known = type(offset) is int and 0 <= offset <= MOST_FIELD
            nccl.remember(file, offset if known else None)
        libraries.append(
            Library(
                reader.text(row["path"]),
                file,
                reader.text(row["device"], 32),
                reader.integers([row["inode"]])[0],
                bool(row["deleted"]),
                _shared_offsets(file, {_NAMES.get(name, name): at for name, at in zip(names, offsets, strict=True)}),
                tuple(reader.text(role, 64) for role in row["roles"]),
                (size, ctime_ns),
                reader.integers([row["text_bytes"]])[0],
                layout,
                pid,
            )
        )
    over += _room.cut(pid, libraries, owner)
    libraries.unread = reader.integers([answer.what["unread"]], 1 << 32)[0] + over
    reader.entries(answer.what["entries"])
    return libraries


_LIKELY = re.compile(r"/lib(cuda|cudart|nccl|cublas|torch|nvToolsExt|nvtx)[^/]*$")
"""Names of files that are read first."""
_Hooks = tuple[tuple[str, ...], dict[str, int], int, dict[str, Place]]
_MAX_FILES = 10_000
"""Files remembered: every library of every traced process, many times over."""
_hooks_by_file: OrderedDict[Lasting, _Hooks] = OrderedDict()
_NO_HOOKS: _Hooks = ((), {}, 0, {})
_REFUSED: _Hooks = ((), {}, -1, {})
"""Of a file that is no library's size, or damaged."""


def _hooks(file: File, path: str, owner: str) -> _Hooks:
    """Roles, function offsets and code size of a file. Ranks of a node map the same files, so each is read once."""
    key = lasting(file.key, owner)
    hooks = _hooks_by_file[key] = _read_hooks(file, path, key[1])
    while len(_hooks_by_file) > _MAX_FILES:
        _hooks_by_file.popitem(last=False)
    return hooks


def _read_hooks(file: File, path: str, owner: str) -> _Hooks:
    try:
        functions = symbol_cache.functions(file, _LOOKED_FOR, path, owner)
    except Beyond:
        return _REFUSED
    except (NotElf, OSError):
        return _NO_HOOKS
    roles = tuple(role for role, sentinels in _SENTINELS.items() if not functions.offsets.keys().isdisjoint(sentinels))
    if not roles:
        return _NO_HOOKS
    layers = {_LAYERS[role] for role in roles}
    wanted = (call.symbol for call in calls.CALLS if call.layer in layers)
    offsets = {name: functions.offsets[name] for name in wanted if name in functions.offsets}
    return roles, offsets, functions.text_bytes, {name: functions.places[name] for name in offsets}


def processes() -> Iterator[int]:
    """Every process id of this PID namespace."""
    for entry in os.listdir(PROC):
        if entry.isdigit():
            yield int(entry)


def hidden_processes() -> int:
    """How many processes' mappings may not be looked at."""
    hidden = 0
    for pid in processes():
        try:
            with open(PROC / str(pid) / "maps", "rb") as maps:
                maps.read(1)
        except PermissionError:
            hidden += 1
        except OSError:
            continue
    return hidden


def find_gpu_processes(name: str | None = None) -> list[int]:
    """Processes that map libcuda, whose command line contains ``name`` where given. Argus itself is left out."""
    pids = []
    for pid in processes():
        if pid == os.getpid() or not maps_cuda(pid):
            continue
        if name is not None:
            try:
                command = _of_memory(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if name not in command:
                continue
        pids.append(pid)
    return sorted(pids)


def ancestors(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on."""
    above: list[int] = []
    while (pid := parent_of(pid)) > 0 and pid not in above:
        above.append(pid)
    return above


_STARTERS = ("python", "sudo", "env", "nice", "timeout")


def is_argus(words: list[str]) -> bool:
    """Whether a command line is Argus's own: the command, also under sudo, or its engine."""
    rest = iter(words)
    for word in rest:
        program = Path(word).name
        if program == "argus":
            return True
        if word == "-m":
            return next(rest, "").startswith("argus.")
        if not word.startswith("-") and not program.startswith(_STARTERS):
            return False
    return False


@dataclass(frozen=True)
class Match:
    """A process whose command line contains a text."""

    pid: int
    parent: int
    words: tuple[str, ...]
    on_gpu: bool
    python: bool


def choose_matches(matches: list[Match], *, roots: bool = False) -> list[int]:
    """Which of the processes whose command line contains a text are meant: not what started them, nor their forks.

    A launcher, a shell or a profiler has the script's name in its command line, too, and so have data-loader workers,
    which are copies of their parent. A copy on a GPU whose parent is on none is a program of its own. Where programs on
    a GPU or in Python are among them, others (an editor, ``tail``) are left out.

    Args:
        matches: Those processes.
        roots: Only those whose parent is not among them: their children will be followed.
    """
    by_pid = {match.pid: match for match in matches}
    if roots:
        return sorted(match.pid for match in matches if match.parent not in by_pid)
    left_out: set[int] = set()
    for match in matches:
        parent = by_pid.get(match.parent)
        if parent is None:
            continue
        if parent.words == match.words and (parent.on_gpu or not match.on_gpu):
            left_out.add(match.pid)
        elif not parent.on_gpu:
            left_out.add(parent.pid)
    chosen = [match for match in matches if match.pid not in left_out]
    programs = [match for match in chosen if match.on_gpu or match.python]
    return sorted(match.pid for match in programs or chosen)


def find_named_processes(name: str, *, roots: bool = False) -> list[int]:
    """Programs whose command line contains ``name``, never Argus itself nor what runs it (a shell, sudo).

    Args:
        name: The text.
        roots: As in :func:`choose_matches`.
    """
    own = {os.getpid(), *ancestors(os.getpid())}
    matches = []
    for pid in processes():
        if pid in own:
            continue
        try:
            words = read_command(pid)
        except OSError:
            continue
        if name in " ".join(words) and not is_argus(words):
            matches.append(Match(pid, parent_of(pid), tuple(words), maps_cuda(pid), runs_python(pid)))
    return choose_matches(matches, roots=roots)


def runs_python(pid: int) -> bool:
    """Whether its executable is a Python (false also where it may not be looked at)."""
    try:
        return Path(os.readlink(PROC / str(pid) / "exe")).name.startswith(("python", "pypy"))
    except OSError:
        return False


def read_command(pid: int) -> list[str]:
    """The words of a process's command line; of a kernel thread or zombie none.

    Raises:
        OSError: The process has ended.
    """
    line = _of_memory(pid, "cmdline")
    return [word.decode(errors="replace") for word in line.rstrip(b"\0").split(b"\0")] if line else []


def descendants(roots: Iterable[int]) -> list[int]:
    """Every process below ``roots``, by parent links; roots not included."""
    children = _children()
    below: list[int] = []
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            below.append(child)
            queue.append(child)
    return sorted(below)


def _children() -> dict[int, list[int]]:
    """Every process's children now."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        children.setdefault(parent_of(pid), []).append(pid)
    return children


@dataclass(frozen=True)
class Some:
    """Processes: the lowest of them, as many as a sentence lists, and how many there are."""

    first: tuple[int, ...] = ()
    number: int = 0

    def __str__(self) -> str:
        more = self.number - len(self.first)
        return ", ".join(map(str, self.first)) + (f" and {more} more" if more else "")


class Tree:
    """All processes, and which of those below one use a GPU or are ranks. Each is read once, when it is first asked
    for, however many are opened and lie below one another."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] | None = None
        self._helpers: dict[int, Some] = {}
        self._ranks: dict[int, Some] = {}

    def helpers(self, pid: int) -> Some:
        """Those below a process that map libcuda."""
        return self._gather(pid, self._helpers, maps_cuda)

    def ranks(self, pid: int) -> Some:
        """Those below a process whose environment says that they are ranks."""
        return self._gather(pid, self._ranks, lambda child: identity_of(child).rank >= 0)

    def _gather(self, pid: int, below: dict[int, Some], wanted: Callable[[int], bool]) -> Some:
        """``below``: what has been gathered, by process."""
        children = self._children = self._children or _children()
        order, queue = dict.fromkeys([pid] if pid not in below else []), [pid]
        while queue:
            # A number that was given away meanwhile might make a circle.
            fresh = [one for one in children.get(queue.pop(), []) if one not in below and one not in order]
            order |= dict.fromkeys(fresh)
            queue += fresh
        for one in reversed(order):
            first, number = [], 0
            for child in children.get(one, []):
                deeper, is_one = below.get(child, Some()), wanted(child)
                first += [*deeper.first, *[child] * is_one]
                number += deeper.number + is_one
            below[one] = Some(tuple(sorted(first)[:RANKS_LISTED]), number)
        return below[pid]


_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the host's PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h)."""


def sees_host_pids() -> bool:
    """Whether Argus numbers processes as the kernel reports them: not in a container with PIDs of its own."""
    return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
