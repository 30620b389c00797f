"""``argus health``: isolation, time, overlap, formats, settings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from argus.health import config, isolate
from argus.health.check import Look, Result, worst
from argus.health.output import details
from argus.health.run import Run, State, _remember
from argus.model.errors import ArgusError
from tests.e2e.health_node import MAIN, Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_plugins_that_misbehave_disturb_nobody(node: Node, tmp_path: Path) -> None:
    """They hang, crash, print garbage, print without end, eat memory, leave processes behind: all run side by side."""
    node.settings |= {"check_s": 2.0, "memory_mb": 200}
    node.plugin("good", "echo 'fine | speed=17.5;20;30 heat=40C'")
    node.plugin("warns", "echo 'too warm'; exit 1")
    node.plugin("fails", "echo 'broken'; exit 2")
    node.plugin("hangs", f"echo $$ > {tmp_path}/hangs.pid; sleep 1000 & echo $! > {tmp_path}/grandchild.pid; wait")
    node.plugin("crashes", "kill -SEGV $$")
    node.plugin("garbage", "head -c 3000 /dev/zero | tr '\\0' '\\377'; echo; exit 0")
    node.plugin("endless", "cat /dev/zero")
    node.plugin("eats", f"exec {sys.executable} -c 'x = bytearray(1 << 30)'")
    node.plugin("leaves", f"setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $! > {tmp_path}/left.pid; echo done")
    names = ["good", "warns", "fails", "hangs", "crashes", "garbage", "endless", "eats", "leaves", "memory"]
    code, output, _ = node.health("--format", "json", *(word for name in names for word in ("--only", name)))
    reported = json.loads(output)
    found = {result["name"]: (result["status"], result["text"]) for result in reported["results"]}
    assert code == 2
    assert found["good"] == ("ok", "fine")
    assert next(r for r in reported["results"] if r["name"] == "good")["figures"] == {"speed": 17.5, "heat": 40.0}
    assert found["warns"] == ("warning", "too warm")
    assert found["fails"] == ("critical", "broken")
    assert found["hangs"][0] == "unknown"
    assert re.match(r"did not answer within 2 s, at: running .*hangs", found["hangs"][1])
    assert found["crashes"][0] == "unknown"
    assert "exit code -11" in found["crashes"][1]
    assert found["garbage"][0] == "ok"
    assert len(found["garbage"][1]) <= 400
    assert found["endless"] == ("unknown", "printed more than 64 KiB")
    assert found["eats"][0] == "warning" or "exit code 1" in found["eats"][1]
    assert found["memory"][0] == "ok"
    for name in ("hangs", "grandchild", "left"):
        pid = int((tmp_path / f"{name}.pid").read_text())
        assert not isolate.alive(isolate.identity(pid)), name
    assert reported["cpu_s"] > 0
    assert reported["rss_bytes"] > 1 << 20


TASKS = """
import json, os, signal, sys, time
from argus.health.isolate import Task, run_all
def hang(note):
    note("first"); note("ioctl 7"); time.sleep(1000)
def crash(note):
    os.kill(os.getpid(), signal.SIGSEGV)
def fork(note):
    if os.fork() == 0:
        time.sleep(1000)
    return "parent"
def eat(note):
    return len(bytearray(1 << 30))
tasks = [Task("hang", hang, 0.5), Task("crash", crash, 9), Task("raise", lambda note: 1 / 0, 9),
         Task("eat", eat, 9, 100 << 20), Task("print", lambda note: print("x" * 99999) or 5, 9),
         Task("exit", lambda note: os._exit(3), 9), Task("much", lambda note: "x" * (1 << 20), 9),
         Task("fork", fork, 9), Task("odd", lambda note: {1, 2}, 9)]
done = run_all(tasks, 20.0)
late = run_all([Task(str(n), lambda note: time.sleep(1000), 50) for n in range(6)], 0.5)
left = open("/proc/thread-self/children").read().split()
print(json.dumps([{k: (o.value, o.error) for k, o in x.items()} for x in (done, late)] + [left]))
"""


def test_functions_that_misbehave_disturb_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", TASKS], capture_output=True, text=True, timeout=60, check=True)
    found, late, left = json.loads(done.stdout)
    assert done.stderr == ""
    assert re.match(r"did not answer within \d s, at: ioctl 7", found["hang"][1])
    assert found["crash"][1] == "died of SIGSEGV"
    assert re.match(r"crashed: ZeroDivisionError: division by zero \(<string>:\d+\)", found["raise"][1])
    assert found["eat"][1] == "needed more memory than it may have (100 MiB)"
    assert found["print"] == [5, ""]
    assert found["exit"][1] == "ended without an answer"
    assert "KiB" in found["much"][1]
    assert found["fork"] == ["parent", ""]
    assert "set" in found["odd"][1]
    assert {error.partition(" within")[0] for _, error in late.values()} == {
        "did not answer", "was not started: the run's time was up"}  # fmt: skip
    assert left == []


def test_a_hundred_overlapping_starts_run_once(node: Node, tmp_path: Path) -> None:
    node.plugin("slow", f"echo x >> {tmp_path}/ran; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo done")
    node.settings["check_s"] = 200.0
    node.settings["total_s"] = 200.0
    first = node.start("--only", "slow", "--no-store")
    while not (tmp_path / "ran").exists():
        time.sleep(0.02)
    # Starting a hundred interpreters would take a minute of two cores: forks of one that has everything loaded.
    program = f"""
import os, sys
from argus.cli.main import main
import argus.cli.health
from argus.health import config
config.builtin()
codes = []
for k in range(100):
    if os.fork() == 0:
        os.dup2(os.open({str(tmp_path / "output")!r} + str(k), os.O_CREAT | os.O_WRONLY), 1)
        code = main({node.command("--only", "slow", "--no-store")[3:]!r})
        sys.stdout.flush()
        os._exit(code)
for k in range(100):
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(sorted(set(codes)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    (tmp_path / "go").touch()
    output, _ = first.communicate(timeout=60)
    assert done.stdout.strip() == "[3]"  # never ok: nothing is known
    assert "another run is under way" in (tmp_path / "output0").read_text()
    assert (tmp_path / "ran").read_text() == "x\n"
    assert first.returncode == 0
    assert "all is well" in output
    # From now on one that comes too early prints what the last run found.
    (tmp_path / "go").unlink()
    first = node.start("--only", "slow", "--no-store")
    while (tmp_path / "ran").read_text() != "x\nx\n":
        time.sleep(0.02)
    code, output, _ = node.health("--only", "slow")
    assert (code, "by the last run" in output) == (0, True)
    assert node.health("--only", "slow", "--quiet")[:2] == (0, "")
    first.send_signal(signal.SIGKILL)  # and a killed run leaves neither its lock nor its checks behind
    first.wait()
    (tmp_path / "go").touch()
    assert "by the last run" not in node.health("--only", "slow")[1]


def test_a_child_that_no_signal_reaches_is_not_joined_by_another(node: Node, tmp_path: Path) -> None:
    node.plugin("driver", f"echo x >> {tmp_path}/ran")
    assert node.health("--only", "driver")[0] == 0
    state = json.loads((tmp_path / "state" / "state.json").read_text())
    state["stuck"] = {"driver": isolate.identity(os.getpid())}
    (tmp_path / "state" / "state.json").write_text(json.dumps(state))
    status, text = node.check("driver")
    assert (status, (tmp_path / "ran").read_text()) == ("critical", "x\n")
    assert text == f"process {os.getpid()} of an earlier look still sleeps in the kernel"
    state["stuck"] = {"driver": f"{os.getpid()}/1"}  # a stranger that has its number now
    (tmp_path / "state" / "state.json").write_text(json.dumps(state))
    assert node.check("driver")[0] == "ok"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": 1, "looks": [], "stuck": {}, "last": {}}', "\0" * 100])
def test_a_broken_state_is_forgotten(node: Node, tmp_path: Path, text: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text(text)
    assert node.health("--only", "memory")[0] == 0
    assert json.loads((tmp_path / "state" / "state.json").read_text())["last"]["status"] == "ok"


def test_formats(node: Node, tmp_path: Path) -> None:
    node.plugin("bad", "echo 'a | b=1.5'; exit 2")
    node.plugin("odd", 'echo \'{"text": "say \\"hi\\"", "figures": {"x_c/gpu\\"0": 3}, "hint": "do it"}\'; exit 1')
    words = ("--only", "bad", "--only", "odd")
    assert re.fullmatch(r'CRITICAL  \S+: bad: a; odd: say "hi" \(0 ok\)\n', node.health(*words)[1])
    assert "→ do it" in node.health("-v", *words)[1]
    nagios = node.health("--format", "nagios", *words)[1]
    assert re.search(r"^CRITICAL .* \| critical=1 warning=1 .*'bad\.b'=1\.5", nagios)
    file = tmp_path / "argus.prom"
    code, output, _ = node.health("--format", "prometheus-textfile", "-o", str(file), *words)
    assert (code, output) == (2, "")
    lines = file.read_text().splitlines()
    assert any(re.fullmatch(r'argus_health_status\{host="[^"]+",check="bad"\} 2', line) for line in lines)
    assert any(line.endswith('figure="x_c",device="gpu\\"0"} 3') for line in lines)
    form = re.compile(r'#.*|\w+\{(\w+="([^"\\]|\\.)*",?)+\} [0-9.e+-]+')
    assert all(form.fullmatch(line) for line in lines)
    assert node.health("--quiet", "--only", "memory")[:2] == (0, "")
    assert node.health("--quiet", "--only", "bad")[1] != ""


def test_what_is_loaded_before_the_children_starts_no_thread() -> None:
    """They are forked: a lock that a thread holds would stay locked in them."""
    program = """
import os, sys
import argus.cli.health
from argus.health import config
from argus.health.run import _preload
_preload(config.builtin())
print("pyroute2" in sys.modules, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["True", "1"]
    assert int(done.stdout.split()[2]) <= 4  # its three, and the folder that is being read


def test_absence_is_no_health(node: Node) -> None:
    node.file("proc/stat", "")
    code, output, _ = node.health("--only", "edac", "--only", "swap")
    assert code == 3
    assert re.fullmatch(
        r"UNKNOWN  \S+: edac: no memory controller reports errors \(EDAC\); swap: there is no \S+vmstat "
        r"\(0 ok, 2 absent\)\n",
        output,
    )
    assert node.check("edac") == ("absent", "no memory controller reports errors (EDAC)")
    node.settings["required"] = ["edac"]
    assert node.check("edac") == ("critical", "required, but no memory controller reports errors (EDAC)")


def test_what_may_not_be_read_is_unknown(node: Node) -> None:
    node.file("proc/vmstat", "oom_kill 0\n")
    (node.folder / "root/proc/vmstat").chmod(0)
    for path in (node.folder, *node.folder.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/") and "pytest" in str(path):
            path.chmod(0o755)
    node.folder.chmod(0o777)
    if os.geteuid() == 0:
        node.before = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    status, text = node.check("oom")
    assert status == "unknown"
    assert "may not be read: run it as root" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("totl_s = 3", "there is no setting 'totl_s'"),
        ("[memroy]\nwarning = 1", r"there is no \[memroy\] 'memroy'"),
        ("[memory]\nwarn = 1", r"\[memory\]: there is no setting 'warn'"),
        ("[memory]\nwarning = 'low'", "warning must be a number"),
        ("[memory]\nwarning = true", "warning must be a number"),
        ("check_s = -1", "cannot be negative"),
        ("skip = ['swop']", "there is no check 'swop'"),
        ("skip = [1]", "a list of strings"),
        ("x", "is no TOML"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ArgusError, match=message) as failure:
        config.load(tmp_path / "x.toml")
    if "swop" in text or "memroy" in text:
        assert "Did you mean" in failure.value.hint


def test_usage_is_unknown_for_nagios(node: Node) -> None:
    assert node.health("--nonsense")[0] == 3
    assert node.health("--only", "memroy")[0] == 3
    code, _, errors = node.health("--only", "memory", "--skip", "memory")
    assert (code, "no check is left" in errors) == (3, True)


def test_every_check_has_a_function_and_reasons() -> None:
    checks = config.builtin()
    assert len(checks) > 15
    for check in checks:
        assert callable(check.load())
        assert check.about.endswith(".")
        for name, limit in check.limits.items():
            assert limit.meaning, (check.name, name)


def test_the_documentation_has_every_threshold(root: Path) -> None:
    sections = (root / "docs" / "health.md").read_text().split("\n**`")
    for check in config.builtin():
        (section,) = (text for text in sections if text.startswith(f"{check.name}`**"))
        for name, limit in check.limits.items():
            row = f"| `{name}` | `{json.dumps(limit.default)}` | {limit.meaning} | {limit.source} |"
            assert row in section, (check.name, row)


def test_counters_are_compared_with_the_oldest_look_of_an_hour(tmp_path: Path) -> None:
    state = State("boot")
    for minute in range(0, 200, 5):
        result = Result("a", "ok", "", figures={"x_total": float(minute), "y": 1.0})
        _remember(state, Run("n", minute * 60.0, [result]), 3600.0)
    looks = state.looks["a"]
    assert all(set(figures) == {"x_total"} for _, figures in looks)
    assert len(looks) <= 14
    look = Look({}, before=looks, now=200 * 60.0)
    assert 60 <= (look.moved({"x_total": 200.0}, "x_total") or 0) <= 70
    assert look.moved({"x_total": 3.0}, "x_total") == 3.0  # it was reset
    assert look.moved({"z_total": 3.0}, "z_total") is None
    assert look.since() in ("in the last 60 min", "in the last 65 min")


def test_the_worst_status() -> None:
    assert worst(["ok", "unknown", "warning"]) == "warning"
    assert worst(["ok", "unknown", "absent"]) == "unknown"
    assert worst(["ok", "absent"]) == "ok"
    assert worst(["absent"]) == worst([]) == "unknown"


def test_functions_of_others(node: Node, tmp_path: Path) -> None:
    """A distribution as pip installs it, with two entry points: one works, one is broken when it is imported."""
    info = tmp_path / "site" / "their_checks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-checks\nVersion: 1.0\n")
    points = (
        "[argus.health]\nsteps = their_checks:check\nbroken = their_checks.gone:check\nmemory = their_checks:check\n"
    )
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "site" / "their_checks.py").write_text(THEIRS)
    node.environment = {"PYTHONPATH": str(tmp_path / "site")}
    node.file("proc/loadavg", "3.5 0 0 1/1 1")
    node.file("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    names = [word for name in ("steps", "broken", "memory") for word in ("--only", name)]
    code, output, _ = node.health("--format", "json", *names)
    found = {result["name"]: result for result in json.loads(output)["results"]}
    assert code == 3
    assert (found["steps"]["status"], found["steps"]["text"]) == ("ok", "quiet")
    assert (found["steps"]["figures"], found["steps"]["facts"]) == ({"load": 3.5, "looks_total": 1.0}, {"who": "them"})
    assert found["broken"]["status"] == "unknown"
    assert "ModuleNotFoundError: No module named 'their_checks.gone'" in found["broken"]["text"]
    assert found["memory"]["text"].startswith("90")  # Argus's own: its name cannot be taken
    node.limits = {"steps": {"most": 3}}
    code, output, _ = node.health("-v", "--only", "steps")
    assert code == 2
    assert re.search(r"critical  steps  load 3.5, 1 looks since\n +→ See who runs: top.", output), output
    assert "plug-in their_checks:check" in node.health("--list", "--only", "steps")[1]


THEIRS = """
from argus.health.check import Found, Look, Result

def check(look: Look) -> Result:
    found = Found()
    found.facts["who"] = "them"
    found.figures |= {"load": float(look.read("proc/loadavg").split()[0]), "looks_total": 1.0 + len(look.before)}
    since = look.moved(found.figures, "looks_total")
    if found.figures["load"] > look.limits.get("most", 100):
        found.critical(f"load {found.figures['load']}, {since:.0f} looks since", "See who runs: top.")
    return found.result("quiet")
"""


def test_memory_of_whoever_started_it_does_not_count() -> None:
    """A process keeps what its forerunner had at most, when it becomes another program."""
    held = b"x" * (256 << 20)
    words = [sys.executable, "-c", "from argus.health.run import _peak_kib; print(_peak_kib())"]
    own = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert len(held) >> 10 > own > 5 << 10


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_nobody_with_an_empty_environment() -> None:
    """The real program and this very node, as a user without rights, home, PATH and nvidia-smi: nothing crashes, what
    cannot be looked at says why, and nothing that was not looked at is OK."""
    # Not under pytest's folder: every session of pytest takes that folder's rights away from others when it begins.
    with tempfile.TemporaryDirectory(prefix="argus-health-") as name:
        _as_nobody(Path(name))


def _as_nobody(folder: Path) -> None:
    folder.chmod(0o755)
    state = folder / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 54321, 54321)
    settings = folder / "health.toml"
    settings.write_text(f'state_dir = "{state}"\nstore = "off"\n[stuck]\nseconds = 0.2\n')
    settings.chmod(0o644)
    words = ["/usr/bin/setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "/usr/bin/env", "-i"]
    words += [sys.executable, "-c", MAIN, "health", "--format", "json"]
    done = subprocess.run([*words, "--config", str(settings)], capture_output=True, text=True, cwd="/")
    assert done.stderr == ""
    reported = json.loads(done.stdout)
    assert (
        done.returncode
        == reported["exit_code"]
        == {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}[reported["status"]]
    )
    assert {result["name"] for result in reported["results"]} == {
        c.name for c in config.builtin() if c.kind == "builtin"
    }
    for result in reported["results"]:
        assert result["text"]
        assert "crashed" not in result["text"], result
    kernel_log = next(result for result in reported["results"] if result["name"] == "kernel_log")
    if Path("/dev/kmsg").exists() and Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1":
        assert (kernel_log["status"], "run it as root" in kernel_log["text"]) == ("unknown", True)
    assert 0 < reported["cpu_s"] < reported["wall_s"] * 8
    assert 10 << 20 < reported["rss_bytes"] < 1 << 30
    # Without settings there is nowhere to write: one clear line.
    done = subprocess.run(words, capture_output=True, text=True, cwd="/")
    assert done.returncode == 3
    assert re.match(r"argus: .*cannot use the folder .*\n.*state_dir in the settings", done.stderr), done.stderr


def test_checks_with_nothing_to_look_at_take_one_line() -> None:
    results = [
        Result("clock", "ok", "synchronised"),
        Result("gpu", "absent", "no NVIDIA GPU"),
        Result("infiniband", "absent", "no adapter"),
    ]
    run = Run("node", 1, results, 0.1, 0.1, 1 << 20)
    lines = details(run).splitlines()
    assert lines[1].split() == ["ok", "clock", "synchronised"]
    assert lines[2] == "  absent    nothing to look at for gpu, infiniband (--format json gives the reasons)"
    assert len(lines) == 4
