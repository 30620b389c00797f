"""``argus observe`` with real workloads: a server under load, PyTorch with two settings, a traced training job, and
programs with one symptom each, which the report must name."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from argus.compare.observe import exposed
from argus.live import command
from argus.live.account import Account
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import Argus, argus_with
from tests.e2e.test_observe import ARGUS, VERDICTS, argus_process, records
from tests.ports import free_port


@pytest.fixture
def argus_verb(store_url: str) -> Argus:
    """``argus VERB …`` against the test's store."""
    return argus_with(store_url)


PROGRAMS = Path(__file__).with_name("programs") / "observed"
SYMPTOMS = [sys.executable, str(PROGRAMS / "symptoms.py")]


def kinds(metrics: dict[str, Any]) -> set[str]:
    return {sign["kind"] for sign in metrics["decision"]["signs"]}


def observe(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """metrics.json and report.md."""
    return observed(folder, started(folder, *words))


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ARGUS, "--out", str(folder), "--seed", "3", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def observed(folder: Path, process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """The same, of one that was started."""
    _, errors = process.communicate(timeout=1200)
    assert process.returncode in VERDICTS, errors
    metrics, meta = records(folder)
    assert meta["status"] == "finished"
    return metrics, (folder / "report.md").read_text()


SYMPTOM_SIGNS = {
    "two_speeds": ("{state}", 30, (), {"two_modes", "outliers"}),
    "tail": ("", 6, (), {"tail"}),
    "grows": ("{state}", 20, (), {"drift", "shift"}),
    "workers": ("", 6, ("--arm", "WORKERS=1", "--arm", "WORKERS=4"), {"worse_with_more"}),
    "fails": ("{state}", 12, (), {"failures"}),
    "stable": ("", 12, (), set()),
}
"""By program: its argument, runs, options, and the signs of which one must be there."""


@pytest.fixture(scope="module")
def symptoms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """All programs, observed at the same time: they sleep most of it. Where each is observed, and what does it."""
    running = {}
    try:
        for symptom, (argument, repeat, options, _) in SYMPTOM_SIGNS.items():
            folder = tmp_path_factory.mktemp(symptom)
            words = ["--repeat", str(repeat), "--pattern", "latency", *options, "--", *SYMPTOMS, symptom]
            state = [argument.format(state=folder)] if argument else []
            running[symptom] = folder / "o", started(folder / "o", *words, *state)
        yield running
    finally:
        for _, process in running.values():
            process.terminate()
            process.communicate()


@pytest.mark.parametrize("symptom", [symptom for symptom, (*_, signs) in SYMPTOM_SIGNS.items() if signs])
def test_a_symptom_is_told_from_the_report(
    symptoms: dict[str, tuple[Path, subprocess.Popen[str]]], symptom: str
) -> None:
    *_, expected = SYMPTOM_SIGNS[symptom]
    metrics, report = observed(*symptoms[symptom])
    assert metrics["decision"]["status"] == "unstable", metrics["decision"]
    found = kinds(metrics) & expected
    assert found, metrics["decision"]["signs"]
    assert [line for line in report.splitlines() if line.startswith(f"| {next(iter(found))} |")]


def test_a_program_without_any_has_none_of_their_signs(
    symptoms: dict[str, tuple[Path, subprocess.Popen[str]]],
) -> None:
    """Other programs may disturb it, which makes it vary, and no more."""
    metrics, _ = observed(*symptoms["stable"])
    assert not kinds(metrics) & {"two_modes", "failures", "errors", "worse_with_more", "periodic"}


def test_a_server_under_load_is_compared_over_two_settings(tmp_path: Path) -> None:
    port = free_port()
    metrics, report = observe(
        tmp_path / "o", "--repeat", "5", "--arm", "quick=SERVICE_MS=2", "--arm", "slow=SERVICE_MS=12,FAIL_EVERY=20",
        "--serve", shlex.join([sys.executable, str(PROGRAMS / "http_server.py"), str(port)]), "--ready", "listening",
        "--pattern", "latency", "--error-regex", "^error", "--",
        sys.executable, str(PROGRAMS / "http_load.py"), str(port), "2", "60",
    )  # fmt: skip
    assert metrics["decision"]["status"] == "unstable"
    assert {"arms_differ", "errors"} <= kinds(metrics), metrics["decision"]["signs"]
    mean = {(row["arm"], row["figure"]): row["mean"] for row in metrics["summary"]}
    assert mean["quick", "errors"] == 0
    assert mean["slow", "errors"] == 6
    assert mean["quick", "count"] == 120
    assert 2e6 <= mean["quick", "latency_p50_ns"] < 12e6 <= mean["slow", "latency_p50_ns"]
    assert mean["quick", "throughput_s"] > mean["slow", "throughput_s"]
    assert "| arms_differ | latency_p50_ns | " in report
    assert not [run for run in metrics["runs"] if run["status"] != "ok"]


def test_latencies_that_a_server_exposes_are_compared(tmp_path: Path) -> None:
    """The load prints nothing about them."""
    port = free_port()
    load = f"import urllib.request as u; [u.urlopen('http://127.0.0.1:{port}/').read() for _ in range(60)]"
    metrics, _ = observe(
        tmp_path / "o", "--repeat", "3", "--arm", "quick=SERVICE_MS=5", "--arm", "slow=SERVICE_MS=25",
        "--serve", shlex.join([sys.executable, str(PROGRAMS / "http_server.py"), str(port)]), "--ready", "listening",
        "--metrics", f"http://127.0.0.1:{port}/metrics", "--", sys.executable, "-c", load,
    )  # fmt: skip
    assert {run["latency"]["count"] for run in metrics["runs"]} == {60}
    assert "arms_differ" in kinds(metrics), metrics["decision"]
    mean = {(row["arm"], row["figure"]): row["mean"] for row in metrics["summary"]}
    assert 4e6 <= mean["quick", "latency_p50_ns"] < 16e6 <= mean["slow", "latency_p50_ns"] < 64e6
    of_arm = {
        arm: [run["latency"]["mean_ns"] for run in metrics["runs"] if run["arm"] == arm] for arm in ("quick", "slow")
    }
    assert 5e6 <= min(of_arm["quick"]) < 25e6 <= min(of_arm["slow"])


def test_a_page_of_metrics_that_leads_elsewhere_or_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposed, "TIMEOUT_S", 0.5)

    class Hostile(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/there" else 200)
            self.send_header("Location", "/drips")
            self.end_headers()
            for _ in range(100 if self.path == "/drips" else 0):
                self.wfile.write(b"# one more\n")
                time.sleep(0.1)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for path, why in (("there", "cannot be read: Found"), ("drips", "it is incomplete after 500 ms")):
            begun = time.monotonic()
            with pytest.raises(ArgusError, match=why):
                exposed.read_page(f"http://127.0.0.1:{server.server_port}/{path}")
            assert time.monotonic() - begun < 5
        server.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="pip install torch (ARGUS_WITH_TORCH=1)")
@pytest.mark.alone
def test_pytorch_with_and_without_wide_instructions_differs(tmp_path: Path) -> None:
    """Activations and matrix products, one thread: three to four times as long. Eight runs of each: of four no test is
    sure where a shared core makes one arm's runs vary by a quarter."""
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2, which one of the settings switches off")
    metrics, report = observe(
        tmp_path / "o", "--repeat", "8", "--arm", "all=ONEDNN_MAX_CPU_ISA=DEFAULT,OMP_NUM_THREADS=1",
        "--arm", "sse=ONEDNN_MAX_CPU_ISA=SSE41,ATEN_CPU_CAPABILITY=default,OMP_NUM_THREADS=1", "--pattern", "step",
        "--",
        sys.executable, str(PROGRAMS / "torch_steps.py"),
    )  # fmt: skip
    assert "arms_differ" in kinds(metrics), metrics["decision"]
    mean = {row["arm"]: row["mean"] for row in metrics["summary"] if row["figure"] == "latency_p50_ns"}
    assert mean["sse"] > 1.5 * mean["all"]
    assert "sse" in next(line for line in report.splitlines() if line.startswith("| arms_differ |"))


@pytest.mark.kernel
def test_a_training_job_is_traced_in_each_run(
    tmp_path: Path, argus_verb: Argus, store_url: str, fakegpu: Path, root: Path
) -> None:
    """Its steps are the figure, and each run is in the store as any traced one."""
    launcher = [sys.executable, str(root / "tests/fakegpu/run.py"), "--ranks", "2", "--", "--steps", "48"]
    folder = tmp_path / "o"
    done = argus_process(
        "--trace", "--job", "bench", "--store", store_url, "--repeat", "2", "--warmup", "1", "--arm", "plain",
        "--arm", "slow=FAKEGPU_SLOW_RANK=1,FAKEGPU_SLOW_FACTOR=2.5", "--out", str(folder), "--", *launcher,
    )  # fmt: skip
    assert done.returncode in (0, 10, 12, 13), done.stderr
    metrics, _ = records(folder)
    runs = [run for run in metrics["runs"] if not run["warmup"]]
    assert [("trace" in run, "step_ns" in run["figures"]) for run in metrics["runs"]].count((False, False)) == 2
    assert {run["trace"]["state"] for run in runs} == {"on"}
    assert {(run["arm"], run["trace"]["job"]) for run in runs} == {("plain", "bench+plain"), ("slow", "bench+slow")}
    with open_store(store_url, create=False) as store:
        rows = query_columns(
            store, "SELECT job, run, avg(duration_ns) AS ns FROM iterations WHERE step >= 5 GROUP BY ALL"
        )
    stored = {(job, int(run)): ns for job, run, ns in zip(rows["job"], rows["run"], rows["ns"], strict=True)}
    assert len(stored) == 4
    for run in runs:
        figures, key = run["figures"], (run["trace"]["job"], run["trace"]["run"])
        assert figures["step_ns"] == pytest.approx(stored[key], rel=0.05)
        assert 40 * figures["step_ns"] < figures["wall_ns"] < 30e9
        assert figures["user_ns"] + figures["system_ns"] < run["trace"]["argus_cpu_ns"] + figures["wall_ns"] * 4
        assert figures["peak_memory_bytes"] > 1e6
    step = {row["arm"]: row["min"] for row in metrics["summary"] if row["figure"] == "step_ns"}
    assert step["slow"] > 1.5 * step["plain"], step
    report = (folder / "report.md").read_text()
    commands = [line for line in report.splitlines() if line.startswith(("argus diagnose", "argus compare"))]
    assert [shlex.split(line)[1] for line in commands[:2]] == ["diagnose", "compare"]
    for line in commands:
        verb, *words = shlex.split(line)[1:]
        looked = argus_verb(verb, *words)
        assert looked.returncode == 0, looked.stderr
    assert re.search(r"Argus itself used .* of CPU time in a run", report)


@pytest.mark.kernel
def test_a_traced_run_that_fails_or_takes_too_long_is_recorded_as_it_ended(tmp_path: Path, store_url: str) -> None:
    folder = tmp_path / "o"
    arms = [word for how in ("well", "code", "signal", "late") for word in ("--arm", f"HOW={how}")]
    script = "case $HOW in code) exit 3;; signal) kill -SEGV $$;; late) trap '' TERM; sleep 600 & sleep 600;; esac"
    done = argus_process(
        "--trace", "--store", store_url, "--repeat", "1", *arms, "--timeout", "1s", "--out", str(folder),
        "--", "sh", "-c", script,
    )  # fmt: skip
    assert done.returncode == 10, done.stderr
    metrics, _ = records(folder)
    ends = {run["arm"][4:]: (run["status"], run["exit_code"], run["signal"]) for run in metrics["runs"]}
    assert ends == {"well": ("ok", 0, None), "code": ("failed", 3, None), "signal": ("failed", None, 11),
                    "late": ("timeout", None, 9)}  # fmt: skip


def test_without_root_tracing_is_refused_in_one_line(tmp_path: Path) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    tmp_path.chmod(0o777)
    words = [*nobody, sys.executable, "-m", "argus.cli.main", "observe", "--trace", "--out", str(tmp_path / "o")]
    done = subprocess.run(
        [*words, "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HOME": "/tmp"},
    )
    assert done.returncode == EXIT_UNAVAILABLE
    first, hint = done.stderr.splitlines()
    assert re.fullmatch(r"argus: --trace needs root: CAP_.* (is|are) lacking", first)
    assert "sudo" in hint
    assert not (tmp_path / "o").exists()


@pytest.mark.kernel
def test_the_account_of_a_traced_command_is_of_the_command_alone(tmp_path: Path, argus_verb: Argus) -> None:
    account = tmp_path / "account.json"
    done = argus_verb("run", "--account", str(account), "--", "sh", "-c", "sleep 0.3; kill -TERM $$")
    assert done.returncode == 128 + 15, done.stderr
    told = json.loads(account.read_text())
    assert (told["tracing"], told["ended"], told["exit_code"], told["signal"]) == ("on", True, None, 15)
    assert told["wall_ns"] >= 0.3e9
    assert told["user_ns"] + told["system_ns"] < told["wall_ns"]
    assert argus_verb("run", "--account", str(tmp_path / "no/such/folder/x"), "--", "true").returncode == 2


def test_the_wall_time_of_an_account_is_the_command_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argus's own process may get a CPU long after the command has begun, or ended."""
    starting = subprocess.Popen

    class Late(starting):  # type: ignore[type-arg]
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            time.sleep(0.5)

    monkeypatch.setattr(subprocess, "Popen", Late)
    account = Account(tmp_path / "account", "on")
    assert command.run(["true"], dict(os.environ), account=account) == 0
    assert json.loads((tmp_path / "account").read_text())["wall_ns"] >= 0.5e9
