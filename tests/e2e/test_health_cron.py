"""``argus health install-cron``: what it writes, and that a real cron runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.health import cron
from argus.store.open import open_store
from argus.store.reader import query_columns
from argus.system import installation
from tests.lacking import needs_mounts


def test_a_crontab(tmp_path: Path) -> None:
    file = tmp_path / "argus-health"
    plan = cron.Plan(10, ("--store", "clickhouse://a%20b@db/x;y"), jitter_s=60)
    assert cron.install(plan, systemd=False, cron_file=file) == [file]
    *_, line = file.read_text().splitlines()
    assert re.fullmatch(
        r"\*/10 \* \* \* \* root sleep [0-5]?\d; /\S+/argus health --quiet --store 'clickhouse://a\\%20b@db/x;y'"
        r" 2>&1 \| logger -t argus-health", line)  # fmt: skip
    assert 'MAILTO=""' in file.read_text()
    assert file.read_text().endswith("\n")
    assert file.stat().st_mode & 0o777 == 0o644
    cron.install(cron.Plan(60, mail="ops@x.org", jitter_s=0), systemd=False, cron_file=file)
    assert file.read_text().splitlines()[-1].startswith(f"0 * * * * root {installation.program()[0]}")
    assert "logger" not in file.read_text()
    assert cron.remove(cron_file=file, folder=tmp_path) == [file]
    assert cron.remove(cron_file=file, folder=tmp_path) == []
    file.write_text("* * * * * root true\n")
    assert main(["health", "install-cron", "--cron-file", str(file)]) == 3
    assert main(["health", "install-cron", "--cron-file", str(tmp_path / "x"), "--every", "7"]) == 3
    assert main(["health", "install-cron", "--remove", "--cron-file", str(file), "--unit-folder", str(tmp_path)]) == 0
    assert file.exists()


def test_a_timer(tmp_path: Path) -> None:
    files = cron.install(cron.Plan(5, ("--store", "a%b $c")), systemd=True, folder=tmp_path)
    assert [file.name for file in files] == ["argus-health.service", "argus-health.timer"]
    assert '"a%%b $$c"' in files[0].read_text()
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *map(str, files)], capture_output=True, text=True
        )
        wrong = [line for line in done.stderr.splitlines() if "argus-health" in line]
        assert wrong == [], done.stderr
        schedule = subprocess.run(["systemd-analyze", "calendar", "*:0/5"], capture_output=True, text=True, check=True)
        assert "Next elapse" in schedule.stdout
    assert len(cron.remove(cron_file=tmp_path / "none", folder=tmp_path)) == 2


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("cron"), reason="runs a real cron: needs root and cron")
def test_a_real_cron_runs_it(tmp_path: Path) -> None:
    """In namespaces of its own, whose /etc/cron.d is the test's. Cron takes a table as a whole or not at all; the line
    stands there a second time, for cron's start, so that nobody waits for a minute to pass."""
    needs_mounts()
    table, spool, sink = tmp_path / "cron.d", tmp_path / "spool", tmp_path / "output"
    for folder in (table, spool):
        folder.mkdir()
    (tmp_path / "plugins").mkdir()
    plugin = tmp_path / "plugins" / "bad"
    plugin.write_text(f"#!/bin/sh\nenv > {sink}\necho 'broken | x_c=17'; exit 2\n")
    plugin.chmod(0o755)
    (tmp_path / "health.toml").write_text(
        f'state_dir = "{tmp_path}/state"\nplugins = "{tmp_path}/plugins"\nstore = "chdb://{tmp_path}/store"\n'
    )
    mails = tmp_path / "mails"
    plan = cron.Plan(1, ("--config", str(tmp_path / "health.toml"), "--only", "bad"), mail="root", jitter_s=1)
    cron.install(plan, systemd=False, cron_file=table / "argus-health")
    # Cron without a mailer drops the output: logged by `logger` in real use; here it is a file.
    text = (table / "argus-health").read_text()
    text = text.replace("--only bad", f"--only bad > {mails} 2>&1")
    line = text.splitlines()[-1]
    (table / "argus-health").write_text(text + line.replace("* * * * *", "@reboot") + "\n")
    script = (
        f"mount --bind {table} /etc/cron.d; mount --bind {spool} /var/spool/cron; mount -t tmpfs x /run; exec cron -f"
    )
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script],
        env={"PATH": os.environ["PATH"], "ARGUS_SPILL_DIR": "x"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and not (mails.exists() and "broken" in mails.read_text()):
            time.sleep(0.5)
        assert re.fullmatch(r"CRITICAL  \S+: bad: broken \(0 ok\)\n", mails.read_text())
        assert "ARGUS" not in sink.read_text()
    finally:
        process.kill()
        process.wait()
    words = [sys.executable, "-m", "argus.cli.main", "health", "report", "--config", str(tmp_path / "health.toml")]
    report = subprocess.run(words, capture_output=True, text=True)
    assert (report.returncode, report.stdout.startswith("drain")) == (2, True), report.stderr
    with open_store(f"chdb://{tmp_path}/store") as store:
        assert "bad" in query_columns(store, "SELECT check FROM health")["check"].tolist()
