"""Programs that the kernel refuses: the trace goes on without, and says so wherever somebody may look."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run import Job

from argus.model.counters import describe

pytestmark = pytest.mark.kernel

REFUSING = """
import sys
from argus.capture.kernel import programs
refused, load = sys.argv.pop(1).split(","), programs.Module.load
def refusing(self, name, *rest):
    if name not in refused:
        return load(self, name, *rest)
    refusal = programs.LoadError(13, f"program {name}: Permission denied")
    refusal.log = "R1 pointer |= pointer prohibited\\nprocessed 61 insns (limit 1000000) max_states_per_insn 0"
    raise refusal
programs.Module.load = refusing
from argus.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""``argus`` with a loader that refuses some programs, as the verifier does."""
WHY = "the verifier refuses it: R1 pointer |= pointer prohibited"


def argus(refused: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, refused, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("refused", "lost", "message"),
    [
        ("on_switch", {"off-cpu": "off_cpu_not_followed"}, f"off-cpu: failed: cannot follow sched_switch: {WHY}"),
        (
            "on_sample,on_exit,on_fork",
            {
                "sampling": "stacks_not_sampled",
                "thread ends": "thread_ends_not_followed",
                "forks": "forks_not_followed",
            },
            f"sampling: failed: cannot load the program on_sample: {WHY}",
        ),
        (
            "mark_enter,math_exit",
            {
                "ranges": "ranges_not_probed",
                "backward": "backward_not_probed",
                "nvtx": "nvtx_not_probed",
                "math": "math_not_probed",
            },
            "matrix products: failed: cannot load the program math_exit",
        ),
    ],
)
def test_what_the_kernel_refuses_is_a_feature_a_line_and_a_loss(
    store_url: str, refused: str, lost: dict[str, str], message: str
) -> None:
    place = ("--store", store_url)
    with Job(ranks=1) as job:
        words = ("--pid", str(job.pids[0]), "--duration", "2", "--plain", "--no-diagnose")
        out = argus(refused, "trace", *words, *place)
    assert message in out
    (coverage,) = [line for line in out.splitlines() if line.startswith("coverage:")]
    assert coverage.startswith("coverage: incomplete")
    assert all(describe(counter, 1) in coverage for counter in lost.values()), coverage
    query = "SELECT feature, state, reason FROM features FINAL WHERE state = 'failed'"
    rows = [json.loads(line) for line in argus("", "sql", query, "--format", "jsonl", *place).splitlines()]
    assert {row["feature"] for row in rows} == lost.keys()
    assert all(row["reason"].startswith("cannot ") for row in rows)
    verdict = json.loads(argus("", "diagnose", "--format", "json", *place))
    assert not verdict["coverage"]["complete"]
    assert set(lost.values()) <= verdict["coverage"]["dropped"].keys()


def test_a_program_that_nothing_works_without_ends_the_trace(store_url: str, tmp_path: Path) -> None:
    with Job(ranks=1) as job:
        done = subprocess.run(
            [sys.executable, "-c", REFUSING, "cuda_enter", "trace", "--pid", str(job.pids[0]), "--store", store_url],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 3
    assert "cannot load the BPF programs: R1 pointer |= pointer prohibited" in done.stderr


def test_a_check_says_what_of_the_stacks_does_not_start() -> None:
    features = {row["name"]: row for row in json.loads(argus("on_switch", "check", "--format", "json"))["features"]}
    assert features["stacks"]["on"]
    assert features["stacks"]["partial"]
    assert WHY in features["stacks"]["detail"]
