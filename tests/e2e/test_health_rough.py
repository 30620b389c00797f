"""``argus health`` where things go wrong: bad input, a bad disk, a node without room, somebody else's files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from argus.cli.main import main
from argus.health import config, isolate
from argus.health.check import Absent, Blind, Look, Result, readable
from argus.health.checks import _mounts, cpu_frequency, edac, kernel_log, stuck
from argus.health.history import rows
from argus.health.report import report
from argus.health.run import Run, _lock_without_writing
from argus.model.errors import ArgusError
from argus.store.open import open_store
from argus.store.writer import Writer
from tests.e2e.health_node import Node
from tests.lacking import needs_mounts
from tests.stores import new_store

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, or becomes another user: needs root")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def results(output: str) -> dict[str, tuple[str, str]]:
    return {result["name"]: (result["status"], result["text"]) for result in json.loads(output)["results"]}


# ---- plug-ins and checks --------------------------------------------------------------------------------------------


def test_what_plugins_may_say(node: Node, tmp_path: Path) -> None:
    huge = "1" + "0" * 400
    node.plugin("huge", f"""echo '{{"text": "x", "figures": {{"a": {huge}, "b": 2}}}}'""")
    node.plugin("listed", """echo '{"status": [], "text": "x"}'""")
    node.plugin("figures", "echo 'x | a=1.5e3s b=. c=1.2.3 d=-2;3;4 e=+.5%'")
    node.plugin("memory.sh", "echo 'not the memory'")
    node.plugin("a b\nc", "echo odd; exit 1")
    names = ["huge", "listed", "figures", "memory_sh", "a_b_c"]
    code, output, _ = node.health("--format", "json", *(word for name in names for word in ("--only", name)))
    assert code == 1
    reported = {result["name"]: result for result in json.loads(output)["results"]}
    assert reported["huge"]["figures"] == {"b": 2.0}
    assert (reported["listed"]["status"], reported["listed"]["text"]) == (
        "unknown",
        "gave the status [], which is none",
    )
    assert reported["figures"]["figures"] == {"a": 1500.0, "d": -2.0, "e": 0.5}
    assert reported["memory_sh"]["text"] == "not the memory"
    assert reported["a_b_c"]["status"] == "warning"
    (tmp_path / "plugins" / "broken").write_text("#!/nonexistent\n")
    (tmp_path / "plugins" / "broken").chmod(0o755)
    assert node.check("broken") == ("unknown", "cannot be run: No such file or directory")
    assert "\n" not in node.health("--only", "a_b_c")[1].rstrip("\n")


def test_any_garbage_is_readable() -> None:
    for status in ({}, None, 1, "fine", float("nan")):
        assert readable({"status": status}, "x").status == "unknown"
    assert readable({"status": "ok", "figures": {"a": float("inf"), "b": 10**400, "c": 1}}, "x").figures == {"c": 1.0}


@needs_root
def test_root_runs_no_executable_of_others(node: Node, tmp_path: Path) -> None:
    node.plugin("theirs", f"touch {tmp_path}/ran")
    (tmp_path / "plugins" / "theirs").chmod(0o777)
    status, text = node.check("theirs")
    assert (status, text) == ("unknown", f"not run: others than root may change {tmp_path}/plugins/theirs")
    (tmp_path / "plugins" / "theirs").chmod(0o755)
    (tmp_path / "plugins").chmod(0o757)
    assert node.check("theirs")[0] == "unknown"
    assert not (tmp_path / "ran").exists()
    (tmp_path / "plugins").chmod(0o755)
    assert node.check("theirs")[0] == "ok"


THEIRS = """
import os, stat, time
from argus.health.check import Absent, Blind
def begin(look):
    found = look.found()
    found.critical("gpu0 is broken", "Replace it.")
    return found
def crashes(look): begin(look); 1 / 0
def hangs(look): begin(look); look.note("gpu1"); time.sleep(1000)
def blind(look): begin(look); raise Blind("gpu1 is lost")
def gone(look): begin(look); raise Absent("there is no gpu1")
def scribbles(look):
    for number in range(3, 30):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, b'[[1]]\\n7\\n{"found": 3}\\n{"found": ["ok", "x", ""]}\\n')
        except OSError: pass
    return begin(look).result("")
"""


def test_what_was_found_before_it_went_wrong_counts(node: Node, tmp_path: Path) -> None:
    names = ["crashes", "hangs", "blind", "gone", "scribbles"]
    info = tmp_path / "site" / "rough-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rough\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[argus.health]\n" + "".join(f"{name} = rough:{name}\n" for name in names))
    (tmp_path / "site" / "rough.py").write_text(THEIRS)
    node.environment = {"PYTHONPATH": str(tmp_path / "site")}
    node.settings["check_s"] = 1.0
    code, output, _ = node.health("--format", "json", *(word for name in names for word in ("--only", name)))
    assert code == 2
    reported = results(output)
    assert {status for status, _ in reported.values()} == {"critical"}
    assert reported["crashes"][1].startswith("gpu0 is broken; crashed: ZeroDivisionError: division by zero (")
    assert reported["hangs"][1] == "gpu0 is broken; did not answer within 1 s, at: gpu1"
    assert reported["blind"][1] == "gpu0 is broken; gpu1 is lost"
    assert reported["gone"][1] == "gpu0 is broken; there is no gpu1"
    assert reported["scribbles"][1] == "gpu0 is broken"
    assert json.loads(output)["results"][0]["hint"] == "Replace it."


def test_one_source_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for name, count in (("mc0", "1"), ("mc1", "0")):
        node.file(f"sys/devices/system/edac/mc/{name}/ue_count", count)
    node.file("sys/devices/system/edac/mc/mc0/ce_count", "0")
    limits = {"warning": 10, "critical": 1000}
    result = edac.check(Look(limits, tmp_path / "root"))
    assert result.status == "critical"
    assert re.match("mc0: 1 uncorrected memory errors since boot; mc1: there is no .*ce_count", result.text)
    # The governor of a CPU that is offline answers EBUSY.
    node.file("sys/devices/system/cpu/present", "0-1")
    node.file("sys/devices/system/cpu/online", "0")
    node.file("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance")
    (tmp_path / "root/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor").mkdir(parents=True)
    result = cpu_frequency.check(Look({"governor": "performance", "throttled": 1}, tmp_path / "root"))
    assert (result.status, result.text) == ("warning", "CPUs 0 of 0-1 are online")


def test_errors_are_no_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(Blind, match="Is a directory"):
        Look({}, tmp_path).read("folder")
    with pytest.raises(Absent):
        Look({}, tmp_path).read("folder/x")
    text = "nothing of the kernel's\n"
    (tmp_path / "log").write_text(text)
    for name in ("log", "/dev/null"):
        with pytest.raises(Blind, match="has no kernel messages in it"):
            kernel_log.check(Look({"hours": 6.0, "ignore": []}, kmsg=tmp_path / name))


def test_paths_with_odd_names(tmp_path: Path) -> None:
    node = Node(tmp_path)
    lines = ("1 0 8:1 / /a\\040b\\134c ro - ext4 /dev/a ro", "2 0 8:1 / /d\u00e4\u00df rw - ext4 /dev/b rw")
    node.file("proc/1/mountinfo", "\n".join(lines))
    found = _mounts.mounts(Look({}, tmp_path / "root"))
    assert [mount.path for mount in found] == ["/a b\\c", "/d\u00e4\u00df"]
    node.file("etc/fstab", "/dev/a /a\\040b\\134c ext4 ro 0 0\n")
    assert node.check("read_only")[0] == "ok"
    node.file("etc/fstab", "/dev/a /a ext4 ro 0 0\n")
    assert node.check("read_only")[0] == "critical"


def test_a_stuck_thread(tmp_path: Path) -> None:
    """Not the first thread of its process, which only waits."""
    node = Node(tmp_path)
    for tid, state in ((4711, "S"), (4712, "D")):
        node.file(f"proc/4711/task/{tid}/stat", f"{tid} (py (x) thon) {state} 1 " + "0 " * 17 + "99 0\n")
        node.file(f"proc/4711/task/{tid}/status", "voluntary_ctxt_switches:\t7\n")
    result = stuck.check(Look({"seconds": 0.0, "critical": 20}, tmp_path / "root"))
    assert (result.status, result.text) == ("warning", "1 task stuck in the kernel: py (x) thon (4712)")


# ---- the disk, processes, time --------------------------------------------------------------------------------------


@needs_root
def test_a_disk_that_takes_no_writes(node: Node, tmp_path: Path) -> None:
    """The node is looked at all the same, once at a time, and says why nothing is remembered."""
    needs_mounts()
    state = tmp_path / "state"
    state.mkdir()
    node.file("proc/vmstat", "oom_kill 0\n")
    for script, why in (
        ("mount -t tmpfs -o ro,mode=700 x {0}", "Read-only file system"),
        ("mount -t tmpfs -o size=4k,mode=700 x {0}; head -c 4096 /dev/zero > {0}/full", "No space left on device"),
    ):
        node.before = ["unshare", "--mount", "sh", "-c", f'{script.format(state)}; exec "$@"', "sh"]
        code, output, _ = node.health("--only", "oom", "--format", "json")
        assert code == 1
        text = f"cannot remember what was found, and counters are not compared: {state}: {why}"
        assert results(output) == {"oom": ("ok", "0 since boot"), "state": ("warning", text)}


def test_a_run_is_kept_back_by_nobody_who_may_only_open_a_folder(tmp_path: Path) -> None:
    above, state = tmp_path / "above", tmp_path / "above" / "state"
    above.mkdir()
    above.chmod(0o755)
    locked = os.open(above, os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)
    lock = _lock_without_writing(state)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    state.mkdir(mode=0o700)
    own = _lock_without_writing(state)
    assert os.path.samestat(os.fstat(own), state.stat())
    for fd in (locked, lock, own):
        os.close(fd)


def test_a_run_that_never_ends_is_reported(node: Node, tmp_path: Path) -> None:
    node.settings["total_s"] = 1.0
    node.plugin("fine", "echo fine")
    assert node.health("--only", "fine")[0] == 0
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom argus.health.run import _locked\n"
        f"with _locked(Path({str(tmp_path / 'state')!r})) as lock:\n    print(lock is not None, flush=True)\n"
        "    time.sleep(1000)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        code, output, _ = node.health("--only", "fine", "--quiet")
        assert (code, output) == (0, "")  # it is in time yet
        lock = tmp_path / "state" / "lock"
        assert lock.read_text().strip() == isolate.identity(holder.pid)
        # As if it were an hour old: nobody waits for that here.
        reported = (
            "import argus.health.run as r, sys; r._GRACE_S = -1.0; from argus.cli.main import main; sys.exit(main())"
        )
        words = [sys.executable, "-c", reported, *node.command("--only", "fine", "--quiet", "--no-store")[3:]]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 3
        text = rf"earlier_run: process {holder.pid} has been at it for (\d+ min )?\d+ s and does not end"
        assert re.search(text, done.stdout)
    finally:
        holder.kill()
        holder.wait()
    assert node.health("--only", "fine")[0] == 0


def test_a_clock_that_was_set_back(node: Node, tmp_path: Path) -> None:
    node.file("proc/vmstat", "pswpin 0\npswpout 0\n")
    assert node.check("swap") == ("ok", "first look: counting from here")
    file = tmp_path / "state" / "state.json"
    state = json.loads(file.read_text())
    state["looks"]["swap"][0][0] += 7200  # that look was made before the clock was put right
    file.write_text(json.dumps(state))
    node.file("proc/vmstat", "pswpin 90000\npswpout 0\n")
    assert node.check("swap") == ("ok", "first look: counting from here")


@needs_root
def test_a_node_without_room_for_processes(node: Node) -> None:
    node.folder.chmod(0o777)
    for path in node.folder.parents:
        if path != Path("/") and path.stat().st_uid == os.getuid() and "pytest" in str(path):
            path.chmod(0o755)
    node.settings["store"] = "off"
    user = "54399"
    node.before = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "prlimit", "--nproc=1"]
    code, output, _ = node.health("--only", "memory", "--format", "json")
    assert code == 3
    assert results(output)["memory"] == ("unknown", "could not be started: Resource temporarily unavailable")


def test_what_is_ended_leaves_nothing(node: Node, tmp_path: Path) -> None:
    """By SIGTERM not even grandchildren; by SIGKILL no program that a check started."""
    node.plugin("hangs", f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 1000")
    node.settings |= {"check_s": 600.0, "total_s": 600.0}  # however busy the machine is, it ends by signals only
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        process = node.start("--only", "hangs", "--no-store")
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        who = isolate.identity(int((tmp_path / "pid").read_text()))
        assert isolate.alive(who)
        process.send_signal(number)
        process.communicate(timeout=120)
        assert process.returncode == (128 + number if number != signal.SIGKILL else -9)
        deadline = time.monotonic() + 60
        while isolate.alive(who) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not isolate.alive(who), number
        (tmp_path / "pid").unlink()


# ---- settings and output --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("total_s = inf", "total_s cannot be more than 1,000,000"),
        ("total_s = nan", "nan is none"),
        ("[memory]\nwarning = nan", "nan is none"),
        ("memory_mb = 10000000000000000000000", "memory_mb cannot be more"),
        ("x = " + "[" * 100_000, "is no TOML: it is nested too deeply"),
        ("x = " + "1" * 5000, "is no TOML"),
        ("# " + "x" * (1 << 20), "has more than 1 MiB"),
        ("\udcff", "is no TOML"),
    ],
)
def test_garbage_for_settings(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(ArgusError, match=message) as failure:
        config.load(tmp_path / "x.toml")
    assert failure.value.hint
    assert "\n" not in str(failure.value)


@needs_root
def test_settings_that_may_not_be_read(tmp_path: Path) -> None:
    closed = tmp_path / "argus"
    closed.mkdir(mode=0o700)
    (closed / "health.d").mkdir()
    for path in (tmp_path, *tmp_path.parents):
        if path != Path("/") and path.stat().st_uid == os.getuid() and "pytest" in str(path):
            path.chmod(0o755)
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom argus.cli.main import main\nfrom argus.health import config\n"
        f"config.DEFAULT_FILE = Path({str(closed / 'health.toml')!r})\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program, "health", "--list"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert re.match(r"argus: cannot read .*health.toml: Permission denied\n.*--config FILE\n$", done.stderr)
    (tmp_path / "own.toml").write_text(f'plugins = "{closed}/health.d"\n')
    (tmp_path / "own.toml").chmod(0o644)
    words = [sys.executable, "-c", program, "health", "--list", "--config", str(tmp_path / "own.toml")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot read the plug-ins in" in done.stderr


@needs_root
def test_output_replaces_files_only(node: Node, tmp_path: Path) -> None:
    node.plugin("fine", "echo fine")
    device, link, target = tmp_path / "null", tmp_path / "link", tmp_path / "target"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    link.symlink_to(target)
    target.write_text("root's")
    assert node.health("--only", "fine", "--output", str(device))[0] == 0
    assert stat.S_ISCHR(device.stat().st_mode)
    assert node.health("--only", "fine", "--output", str(link))[0] == 0
    assert (link.is_symlink(), target.read_text()) == (False, "root's")  # others may have put the link there
    assert "all is well" in link.read_text()
    assert node.health("--only", "fine", "--output", "/dev/stdout") == (0, link.read_text(), "")
    assert Path("/dev/stdout").is_symlink()
    for place in (tmp_path / "plugins", Path("/"), tmp_path / "none" / "x"):
        code, _, errors = node.health("--only", "fine", "--output", str(place))
        assert (code, f"cannot write {place}: " in errors) == (3, True), errors
        assert "--output FILE" in errors
    assert not list(tmp_path.glob(".*"))
    node.plugin("fine", "echo broken; exit 2")
    code, output, errors = node.health("--only", "fine", "--output", str(tmp_path / "none" / "x"))
    assert (code, "fine: broken" in output, "cannot write" in errors) == (2, True, True)


def test_output_that_nobody_takes(node: Node) -> None:
    node.plugin("bad", "echo broken; exit 2")
    words = " ".join(f"'{word}'" for word in node.command("--only", "bad", "-v", "--no-store"))
    for sink, code in ((" | true", 2), (" > /dev/full", 3)):
        done = subprocess.run(
            ["bash", "-c", f"{words}{sink}; echo ${{PIPESTATUS[0]}} >&2"], capture_output=True, text=True
        )
        lines = done.stderr.splitlines()
        assert lines[-1] == str(code), done.stderr
        assert lines[:-1] == ([] if code == 2 else ["argus: No space left on device"])
    done = subprocess.run(["bash", "-c", f"{words} <&- >&- 2>&-"])
    assert done.returncode == 2


# ---- cron -----------------------------------------------------------------------------------------------------------


def test_what_would_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "argus-health"
    words = ["health", "install-cron", "--cron-file", str(file), "--every", "10"]
    assert main([*words, "--print"]) == 0
    output = capsys.readouterr().out
    assert not file.exists()
    assert main(words) == 0
    assert output == f"# {file}\n{file.read_text()}"
    capsys.readouterr()
    units = ["--systemd-timer", "--unit-folder", str(tmp_path), "--print"]
    assert main(["health", "install-cron", *units]) == 0
    assert f"# {tmp_path}/argus-health.timer\n" in capsys.readouterr().out
    assert not (tmp_path / "argus-health.timer").exists()
    assert main([*words, "--print", "--remove"]) == 3
    assert file.exists()


def test_a_crontab_that_would_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "argus-health"

    def install(*words: str) -> str:
        code = main(["health", "install-cron", "--cron-file", str(file), *words])
        output = capsys.readouterr().err
        assert (code == 0) == file.exists()
        assert code in (0, 3)
        file.unlink(missing_ok=True)
        return output

    assert "there is no user 'nosuchuser'" in install("--user", "nosuchuser")
    assert "unknown kind of store" in install("--store", "bogus://x")
    assert "holds a password" in install("--store", "clickhouse://a:secret@db/x")
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", "secret")
    assert "cron does not have your ARGUS_STORE_PASSWORD" in install("--store", "clickhouse://a@db/x")
    monkeypatch.setenv("ARGUS_STORE_PASSWORD_FILE", 'a"b')
    assert "ARGUS_STORE_PASSWORD_FILE has characters" in install("--store", "clickhouse://a@db/x")
    monkeypatch.setenv("ARGUS_STORE_PASSWORD_FILE", "/etc/argus/pass word%")
    assert main(["health", "install-cron", "--cron-file", str(file), "--store", "clickhouse://a@db/x"]) == 0
    assert '\nARGUS_STORE_PASSWORD_FILE="/etc/argus/pass word%"\n' in file.read_text()
    assert "secret" not in file.read_text()
    units = ["--systemd-timer", "--unit-folder", str(tmp_path)]
    assert main(["health", "install-cron", "--store", "clickhouse://a@db/x", *units]) == 0
    assert '\nEnvironment="ARGUS_STORE_PASSWORD_FILE=/etc/argus/pass word%%"\n' in (
        tmp_path / "argus-health.service").read_text()  # fmt: skip
    capsys.readouterr()
    dotted = tmp_path / "argus.health"
    assert main(["health", "install-cron", "--cron-file", str(dotted)]) == 3
    assert "cron reads no file of the name 'argus.health'" in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe")
    assert main(["health", "install-cron", "--cron-file", str(file)]) == 3
    assert "is not Argus's" in capsys.readouterr().err
    words = ["--remove", "--cron-file", str(file), "--unit-folder", str(tmp_path / "x")]
    assert main(["health", "install-cron", *words]) == 0
    assert file.exists()


def test_a_wrong_store_is_reported(node: Node) -> None:
    code, output, errors = node.health("--only", "memory", store="bogus://x")
    assert (code, output, "unknown kind of store in 'bogus://x'" in errors) == (3, "", True)
    node.settings["store"] = "clickhouse://a:secret@db/x"
    node.environment = {"ARGUS_STORE": "chdb://x"}
    assert node.health("--only", "memory", store="clickhouse://a:secret@db/x")[0] == 3
    node.settings["store"] = "off"
    code, _, errors = node.health("report", store="off")
    assert (code, "there is no history: store is off" in errors) == (3, True)
    # A place that takes no files is reported beside the result, which it does not change.
    node.environment = {"ARGUS_SPILL_DIR": "/proc/none"}
    code, output, _ = node.health("--only", "memory", store="clickhouse://127.0.0.1:1/x")
    assert (code, ", history: cannot spill to /proc/none" in output) == (0, True)


# ---- history --------------------------------------------------------------------------------------------------------


def test_what_other_nodes_stored_is_printed_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = new_store(tmp_path)
    with open_store(url) as store, Writer(store, source="test") as writer:
        result = Result("x\ny", "critical", "\x1b]0;mine\x07 bad\nnode9 is fine", "do\r\n")
        for table, columns in rows(Run("a\x1b[31m\nb", time.time() - 60, [result], kind="k\n")).items():
            writer.append(table, columns)
    assert main(["health", "report", "--store", url]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "drain    100  a [31m b  (k)",
        "              critical  x y: ]0;mine bad node9 is fine",
        "                        → do",
        "1 node: 1 to be drained, 0 to be watched",
    ]


def test_a_measurement_stands_until_the_next() -> None:
    from argus.health.trend import held

    nan = np.nan
    values = np.array([[nan, 1.0, nan, nan, nan, 2.0], [3.0, nan, 4.0, nan, nan, nan]])
    expected = [[nan, 1.0, 1.0, 1.0, nan, 2.0], [3.0, 3.0, 4.0, 4.0, 4.0, nan]]
    np.testing.assert_array_equal(held(values, 3), expected)


def test_what_is_measured_daily_and_what_makes_the_kind(tmp_path: Path) -> None:
    """A probe once a day has a trend; a node that lost a DIMM or a GPU is not of another kind."""
    now = time.time() // 3600 * 3600 + 1800
    with open_store(new_store(tmp_path)) as store, Writer(store, source="test") as writer:
        for node in range(5):
            for hour in range(7 * 24 + 1, -1, -3):
                broken, lost = node == 1 and hour < 14, node == 2 and hour < 14
                figures = {"total_gib": 1024.0 * (0.9 if lost else 1)}
                found = [Result("memory", "ok", "", figures=figures)]
                found += [Result("gpu", "ok", "", figures={"count": 7.0 if lost else 8.0})]
                if hour % 24 == 10:
                    speed = (200 + node + hour % 7) * (0.8 if broken else 1.0)
                    found += [Result("probe_memory", "ok", "", figures={"copy_gb_per_s": speed})]
                kind = "7 x H100, 922 GiB" if lost else "8 x H100, 1024 GiB"
                for table, columns in rows(Run(f"node{node}", now - 3600 * hour, found, kind=kind)).items():
                    writer.append(table, columns)
        writer.flush()
        reasons = {node.host: {r.name for r in node.reasons} for node in report(store, now=now + 60)}
    assert reasons["node1"] == {"probe_memory.copy_gb_per_s"}
    assert reasons["node2"] == {"memory.total_gib", "gpu.count"}
    assert not any(reasons[f"node{node}"] for node in (0, 3, 4))
