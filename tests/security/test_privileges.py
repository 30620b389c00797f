"""What root's rights Argus needs, what it gives up, and that it needs no root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from argus.cli.main import cli
from argus.system import privileges
from tests.e2e.conftest import ARGUS, attached
from tests.kernel.conftest import wait_for_cuda
from tests.stores import new_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakegpu"))

NOBODY = 65534


def capabilities(status: Path, which: str = "CapEff") -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(which))
    return int(line.split()[1], 16)


def bits(names: set[str]) -> int:
    return sum(1 << privileges.BITS[name] for name in names)


@pytest.mark.kernel
def test_what_is_given_up_is_gone_for_children_too() -> None:
    """A root that executes a program would otherwise have all of them again."""
    script = (
        "import subprocess\nfrom argus.system import privileges\nprivileges.keep({'BPF', 'SYS_PTRACE'})\n"
        "print(subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout)\n"
        "print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines() if line.startswith(("CapEff", "CapPrm", "CapBnd"))]
    assert len(found) == 6
    assert {int(value, 16) for _, value in found} == {bits({"BPF", "SYS_PTRACE"})}


@pytest.mark.kernel
def test_a_trace_gives_up_what_it_does_not_need(tmp_path: Path) -> None:
    from run import Job

    store_url = new_store(tmp_path)
    with Job(ranks=1, args=["--steps", "1000000"]) as job:
        wait_for_cuda(job.pids)
        command = [*ARGUS, "trace", "--pid", str(job.pids[0]), "--store", store_url]
        tracing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            attached(tracing)
            own = Path(f"/proc/{tracing.pid}")
            threads = [task / "status" for task in (own / "task").iterdir()]
            children = (own / "task" / str(tracing.pid) / "children").read_text().split()
            most = bits(set(privileges.NEEDED) | set(privileges.USEFUL))
            if privileges._has_multi_links():
                most &= ~bits({"SYS_ADMIN"})
            for status in (*threads, *(Path(f"/proc/{child}/status") for child in children)):
                assert capabilities(status) & ~most == 0, status
            assert capabilities(own / "status") & bits(set(privileges.NEEDED)) == bits(set(privileges.NEEDED))
        finally:
            tracing.terminate()
            output = tracing.communicate(timeout=60)[0]
    assert "estimated" not in output  # the overhead is measured all the same


@pytest.mark.kernel
def test_a_trace_without_root_and_the_rest_of_its_rights(tmp_path: Path) -> None:
    """As a service would run: a user of its own, with capabilities, and another user's job."""
    from run import Job

    if not privileges._has_multi_links():
        pytest.skip("before Linux 6.6 probes need CAP_SYS_ADMIN, which is root")
    names = ",".join(f"+{name.lower()}" for name in privileges.NEEDED)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    for folder in tmp_path.parents:  # pytest makes its folders for their owner alone
        if folder.stat().st_mode & 0o001:
            break
        folder.chmod(folder.stat().st_mode | 0o001)
    tmp_path.chmod(0o711)
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    prefix += [f"--inh-caps=-all,{names}", f"--ambient-caps=-all,{names}", f"--bounding-set=-all,{names}"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "ARGUS_CACHE_DIR": str(home / "cache")}
    with Job(ranks=2, args=["--steps", "1000000"]) as job:
        wait_for_cuda(job.pids)
        words = ["trace", *(word for pid in job.pids for word in ("--pid", str(pid))), "--steps", "60"]
        done = subprocess.run(
            [*prefix, *ARGUS, *words, "--store", f"chdb://{home}/store"],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment,
            cwd=home,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "coverage: complete" in done.stdout
        # Whom the kernel does not let look, Argus does not: neither trace nor memory of another user's process.
        without = [word.replace(names, "+bpf,+perfmon") for word in prefix]
        refused = subprocess.run(
            [*without, *ARGUS, *words[:3], "--store", f"chdb://{home}/store"],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            cwd=home,
        )
        assert refused.returncode != 0
        assert "cannot be inspected" in refused.stdout + refused.stderr


def test_an_import_keeps_reading_files_of_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[str, ...]] = []
    monkeypatch.setattr(privileges, "own_process", True)
    monkeypatch.setattr(privileges, "keep", kept.append)
    for words in (["kineto"], ["nsys"], ["whatif"], ["flight-recorder"], ["ras"], ["inspector"]):
        done = CliRunner().invoke(cli, ["import", *words, str(tmp_path / "absent"), "--store", f"chdb://{tmp_path}/s"])
        assert done.exit_code != 0
        assert kept == [("DAC_READ_SEARCH",)], words
        kept.clear()


@pytest.mark.kernel
def test_check_lists_what_each_verb_needs_and_what_is_lacking() -> None:
    done = subprocess.run([*ARGUS, "check", "--format", "json"], capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert report["capabilities"]["trace, dump"] == [f"CAP_{name}" for name in privileges.needed()]
    assert report["capabilities"]["others"] == []
    command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"]
    done = subprocess.run(
        [*command, *ARGUS, "check", "--format", "json"], capture_output=True, text=True, timeout=120, cwd="/"
    )
    lacks = next(each for each in json.loads(done.stdout)["features"] if each["name"] == "capabilities")
    assert not lacks["on"]
    assert all(f"CAP_{name}" in lacks["detail"] for name in privileges.NEEDED)


@pytest.mark.kernel
def test_an_engine_keeps_one_right_of_root(tmp_path: Path) -> None:
    """Whatever a query reads or does is up to who may query."""
    store_url = new_store(tmp_path)
    subprocess.run([*ARGUS, "store", "init", "--store", store_url], check=True, capture_output=True)
    query = (
        "SELECT extract(line, '[0-9a-f]{16}') FROM file('/proc/self/status', LineAsString) WHERE line LIKE 'CapEff%'"
    )
    words = [*ARGUS, "sql", "--store", store_url, "--format", "tsv", query]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.strip().splitlines()[-1], 16) == bits({"DAC_READ_SEARCH"})


@pytest.mark.kernel
def test_an_engine_finds_its_store_in_a_user_s_home(tmp_path: Path) -> None:
    """Of whoever called sudo: folders above it that are closed to others kept root's engine out."""
    home = tmp_path / "home"
    home.mkdir(mode=0o750)
    os.chown(home, 1000, 1000)
    (home / "store").mkdir(mode=0o700)
    words = [*ARGUS, "store", "init", "--store", f"chdb://{home}/store"]
    environment = {**os.environ, "SUDO_UID": "1000"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.kernel
def test_a_verb_of_a_store_gives_up_what_it_does_not_need(tmp_path: Path) -> None:
    new_store(tmp_path)
    script = (
        "import sys, argus.system.privileges as p\nkeep = p.keep\n"
        "def told(names): keep(names); print(open('/proc/self/status').read(), file=sys.stderr)\n"
        "p.keep = told\nfrom argus.cli.main import main\nsys.argv = ['argus', 'explain', 'straggler']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    found = [int(line.split()[1], 16) for line in done.stderr.splitlines() if line.startswith(("CapEff", "CapBnd"))]
    assert found == [bits({"DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER"})] * 2
