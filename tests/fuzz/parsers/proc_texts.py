"""What a process may put into its files in /proc: environment, command line, name, paths that it maps, its cgroup."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from argus.capture.process import candidates, symbols, targets
from argus.capture.python import interpreter
from argus.capture.reader import reader
from argus.system import proc
from tests.fuzz.harness import Bytes, is_text, joined

ALLOWED = ()
CODE = ["argus.capture.process.targets", "argus.capture.process.candidates", "argus.system.proc"]
TOKENS = [b"RANK=", b"WORLD_SIZE=", b"LOCAL_RANK=", b"SLURM_JOB_ID=7", b"SLURM_PROCID=1", b"TORCHELASTIC_RUN_ID=",
          b"JOB_NAME=", b"\0", b"\r", b"\n", b"-m\0torch.distributed.run\0", b"kubepods/pod", b"/job_42/",
          b"0123456-89ab-cdef-0123-456789abcdef", b" (deleted)", b"\xed\xa0\x80", b"\xff"]  # fmt: skip
PID = 4242
_folder = Path(tempfile.mkdtemp(prefix="argus-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
_own = os.getpid()


def _remove() -> None:
    if os.getpid() == _own:
        shutil.rmtree(_folder, ignore_errors=True)


import atexit  # noqa: E402

atexit.register(_remove)


def seeds() -> list[bytes]:
    environment = b"RANK=3\0WORLD_SIZE=8\0LOCAL_RANK=3\0MASTER_ADDR=node0\0JOB_NAME=llama\0PATH=/bin"
    slurm = b"SLURM_JOB_ID=42\0SLURM_JOB_NAME=train\0SLURM_PROCID=1\0SLURM_NTASKS=4"
    command = b"python3\0-u\0/srv/train.py\0--lr\0001e-4\0"
    module = b"python3\0-m\0torch.distributed.run\0train.py\0"
    pod = b"0::/kubepods.slice/pod01234567_89ab_cdef_0123_456789abcdef/x"
    job = b"1:memory:/slurm/uid_1000/job_42/step_0"
    return [
        joined(environment, command, pod, b"python3", b"/usr/lib/libcuda.so.1"),
        joined(slurm, module, job, b"a) R 1 (", b"/srv/x\r1000-2000 r-xp 00000000 08:01 7 /usr/lib/libnccl.so"),
        joined(
            b"TORCHELASTIC_RUN_ID=01234567-89ab-cdef-0123-456789abcdef\0RANK=0", command, b"", b"x", b"/a (deleted)"
        ),
    ]


def _escaped(path: bytes) -> bytes:
    """As the kernel writes a path into maps, and a name into status: nothing but the end of a line is escaped."""
    return path.replace(b"\0", b"").replace(b"\n", b"\\012")


def _write(environment: bytes, command: bytes, cgroup: bytes, comm: bytes, path: bytes) -> None:
    folder = _folder / str(PID)
    if not folder.exists():
        (folder / "ns").mkdir(parents=True)
        (_folder / "stat").write_text("cpu 0\nbtime 1790000000\n")
        (_folder / "self" / "ns").mkdir(parents=True)
        (_folder / "self" / "ns" / "pid").symlink_to("pid:[4026531837]")
        (folder / "ns" / "pid").symlink_to("pid:[4026531836]")
        (folder / "exe").symlink_to("/usr/bin/python3")
        (folder / "task" / str(PID)).mkdir(parents=True)
    name = _escaped(comm)[:15]
    line = b"7f0000001000-7f0000002000 r-xp 00001000 08:01 1234 /" + _escaped(path).lstrip(b"/")
    (folder / "environ").write_bytes(environment)
    (folder / "cmdline").write_bytes(command)
    (folder / "cgroup").write_bytes(cgroup)
    (folder / "maps").write_bytes(line + b"\n7ffff000-7fffff00 r-xp 00000000 00:00 0 [vdso]\n")
    (folder / "stat").write_bytes(b"4242 (%s) S 1 4242 4242 0 -1 4194560 %s\n" % (name, b"7 " * 42))
    (folder / "status").write_bytes(
        b"Name:\t%s\nState:\tS (sleeping)\nTgid:\t4242\nUid:\t1000\t1000\t1000\t1000\nNSpid:\t4242\t7\n" % name
    )


def run(data: bytes) -> None:
    environment, command, cgroup, comm, path = Bytes(data).pieces(5)
    _write(environment, command, cgroup, comm, path)
    with (
        mock.patch.object(targets, "PROC", _folder),
        mock.patch.object(proc, "PROC", _folder),
        mock.patch.object(reader, "PROC", _folder),
        mock.patch.object(candidates, "PROC", _folder),
        mock.patch.object(interpreter, "PROC", _folder),
    ):
        output = targets.identify(targets.read_environment(PID), command, proc.read_cgroup(PID))
        whole = targets.owned(output, PID, proc.read_cgroup(PID))
        assert -1 <= output.rank <= targets.MAX_RANK
        assert 0 <= output.world_size <= targets.MAX_RANK
        assert -1 <= output.local_rank <= targets.MAX_RANK
        is_text(output.job, targets.MAX_JOB_NAME)
        assert output.job.isprintable()
        is_text(output.lineage, 6 * len(environment) + 64)
        assert whole.uid == 1000
        is_text(whole.container, 64)
        mappings = targets.executable_mappings(PID)
        # A path may not make a second mapping.
        assert len(mappings) == 1
        assert (mappings[0].start, mappings[0].end, mappings[0].inode) == (0x7F0000001000, 0x7F0000002000, 1234)
        assert len(symbols._MAPS_LINE.findall((_folder / str(PID) / "maps").read_bytes())) == 2
        assert targets.start_ticks(PID) == 7
        assert targets.parent_of(PID) == 1
        assert proc.user_of(PID) == 1000
        assert targets._thread_group(PID) == PID
        words = targets.read_command(PID)
        targets.script_name(words)
        targets.is_argus(words)
        interpreter._numbers_inside(PID)
        found = candidates._inspect(PID)
        if found is not None:
            is_text(found.identity.job, targets.MAX_JOB_NAME)
