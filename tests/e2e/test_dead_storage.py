"""A job whose data lies on a file system that does not answer any more: it hangs, and Argus does not."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run import Job

from tests.e2e.conftest import Log, argus_with, attached, pid_words, start_trace, wait_for_silence
from tests.kernel.conftest import wait_for_cuda
from tests.stores import new_store

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

SERVER = Path(__file__).resolve().parents[1] / "security" / "fuse_folder.py"


@contextlib.contextmanager
def file_system(where: Path, shown: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A file system with one file; yields the process that serves it."""
    where.mkdir()
    server = subprocess.Popen([sys.executable, str(SERVER), str(where), str(shown)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        if not server.stdout.readline():
            pytest.skip("no file systems in user space here (/dev/fuse)")
        yield server
    finally:
        server.kill()  # the kernel gives up what waits for it
        server.wait()
        subprocess.run(["umount", "-l", str(where)], check=False)


def test_a_rank_whose_data_does_not_come_hangs_the_job_and_is_named(tmp_path: Path) -> None:
    store_url, log = new_store(tmp_path), Log(tmp_path, 2)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "batch").write_bytes(bytes(1 << 16))
    with (
        file_system(tmp_path / "1", tmp_path / "0" / "batch") as server,
        Job(ranks=2, args=[*log.args, "--data", str(tmp_path / "{rank}" / "batch")]) as job,
    ):
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids))
        attached(tracing)
        log.wait_for_steps(40)
        server.send_signal(signal.SIGSTOP)
        try:
            wait_for_silence(log, max(6.0, 25 * statistics.median(log.lengths_s())))
            tracing.send_signal(signal.SIGINT)
            output, _ = tracing.communicate(timeout=60)
        finally:
            server.kill()
        assert tracing.returncode == 0, output
    answer = argus_with(store_url)("diagnose", "--format", "json", "--hang-after", "2")
    assert answer.returncode == 0, answer.stderr
    verdict = json.loads(answer.stdout)
    assert verdict["status"] == "hung", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("hang", [1])
    text = " ".join(evidence["text"] for evidence in finding["evidence"])
    assert "rank 1 did not come" in text
    # Whichever of the file's calls it was in: closing asks the file system, too.
    assert re.search(r"of rank 1 waits \((read|disk|other:\w+)\) in (read|open\w*|close) \(libc", text), text
