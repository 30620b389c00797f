"""``argus sql`` in a terminal and in a pipe."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.lacking import open_terminal


def test_a_closed_pipe_is_no_traceback(store_url: str) -> None:
    sql = "SELECT number FROM numbers(1000000)"
    line = f"{sys.executable} -m argus.cli.main sql --store {store_url} --format csv '{sql}' | head -2"
    line = f"set -o pipefail; {line}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout == '"number"\n0\n'
    assert done.returncode == 0, "whoever reads has seen enough: no failure"
    assert "Traceback" not in done.stderr


def test_the_prompt(store_url: str, tmp_path: Path) -> None:
    master, slave = open_terminal()
    environment = {**os.environ, "ARGUS_STORE": store_url, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    child = subprocess.Popen(
        [sys.executable, "-m", "argus.cli.main", "sql"], stdin=slave, stdout=slave, stderr=slave, env=environment,
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    seen = ""

    def expect(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 15
        while text not in seen:
            assert select.select([master], [], [], max(0, end - time.monotonic()))[0], seen
            seen += os.read(master, 4096).decode()
        seen = seen.partition(text)[2]

    def say(text: str) -> None:
        os.write(master, text.encode())

    expect("argus> ")
    say("SELECT 40\n")
    expect("   ... ")
    say("+ 2 AS answer;\n")
    expect("42")
    expect("(1 rows, ")
    expect("argus> ")
    say("SELECT nope;\n")
    expect("Unknown expression identifier `nope`")
    expect("argus> ")
    say("\\d ranks\n")
    expect("Command line")
    expect("argus> ")
    say("SELECT lateness_n\t")
    expect("lateness_ns")
    time.sleep(0.5)  # readline drops a Ctrl-C that comes while it completes a word
    child.send_signal(2)
    expect("argus> ")
    say("SELECT sum(sleepEachRow(0.01)) FROM numbers(2000) SETTINGS max_block_size = 10;\n")
    time.sleep(1)
    child.send_signal(2)
    expect("stopped")
    say("SELECT 6 * 7;\n")
    expect("42")
    expect("argus> ")
    say("\\q\n")
    assert child.wait(10) == 0
    os.close(master)
    history = tmp_path / "argus" / "sql_history"
    assert "SELECT 40" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
