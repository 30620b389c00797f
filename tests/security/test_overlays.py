"""Containers of one image: their overlays show one file below them, and each call of it is recorded once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import wait_until
from tests.security.mapping_process import needs_root
from tests.stores import new_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakegpu"))

pytestmark = [pytest.mark.kernel, needs_root()]
CALLS = 101
PROGRAM = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    library.cuCtxSynchronize()
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def merged() -> Iterator[list[Path]]:
    """Two overlays of one folder, which has a libcuda."""
    from run import BUILD

    folder = Path(tempfile.mkdtemp(prefix="argus-overlay-", dir="/var/tmp"))
    mounted: list[Path] = []
    try:
        (folder / "image").mkdir()
        shutil.copy(BUILD / "libcuda.so.1", folder / "image")
        for number in range(2):
            for name in ("upper", "work", "merged"):
                (folder / f"{name}{number}").mkdir()
            options = f"lowerdir={folder}/image,upperdir={folder}/upper{number},workdir={folder}/work{number}"
            done = subprocess.run(
                ["mount", "-t", "overlay", "overlay", "-o", options, folder / f"merged{number}"],
                capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                pytest.skip(f"no overlay can be mounted here: {done.stderr}")
            mounted.append(folder / f"merged{number}")
        yield mounted
    finally:
        for place in mounted:
            subprocess.run(["umount", "--lazy", place], check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def container(place: Path, rank: int) -> Iterator[subprocess.Popen[str]]:
    environment = {"PATH": os.environ["PATH"], "RANK": str(rank), "WORLD_SIZE": "2", "JOB_NAME": "one"}
    words = ["/usr/bin/python3", "-c", PROGRAM, str(place / "libcuda.so.1"), str(CALLS)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_two_overlays_of_one_image_are_probed_once(merged: list[Path], tmp_path: Path) -> None:
    url = new_store(tmp_path)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(container(place, rank)) for rank, place in enumerate(merged)]
        tracer = Tracer(open_store(url), Options(pids=tuple(one.pid for one in processes), stacks=False))
        tracer.start()
        try:
            for process in processes:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "done\n"
            wait_until(lambda: tracer.poll() is None and tracer.session.has_probes, 10, "a turn")
            members = [member for job in tracer.jobs for member in job.ranks()]
            assert all(member.probes for member in members)
            keys = {library.key for member in members for library in member.target.libraries}
            attached = [one for one in tracer.attached if "libcuda" in one.library.path]
        finally:
            tracer.stop()
    with open_store(url) as store:
        counted = query(
            store, "SELECT rank, count() AS n FROM launches WHERE call = 'cuCtxSynchronize' GROUP BY rank ORDER BY rank"
        ).to_pylist()
    assert counted == [{"rank": 0, "n": CALLS}, {"rank": 1, "n": CALLS}]
    assert len(attached) == 1
    assert len(keys) >= 1
