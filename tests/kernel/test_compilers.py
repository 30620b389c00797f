"""Every BPF program, compiled by other clangs than this machine's (scripts/compilers), is loaded into this kernel, and
works. They are 70 MB each, so only those run that were fetched: ARGUS_WITH_NEWEST_BCC=sid scripts/setup fetches the
newest that Debian has. Where that variable is set, as in CI, its compiler must be there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import compilers

NEWEST = os.environ.get("ARGUS_WITH_NEWEST_BCC", "")

pytestmark = pytest.mark.kernel


FETCHED = [suite for suite in compilers.SUITES if compilers.Compiler(suite).is_there]


@pytest.mark.parametrize("suite", dict.fromkeys([*FETCHED, *filter(None, [NEWEST])]) or ["sid"])
def test_the_programs_of_other_compilers_load_and_work(suite: str) -> None:
    compiler = compilers.Compiler(suite)
    if not compiler.is_there and suite != NEWEST:
        pytest.skip(f"the compiler of {suite} was not fetched (ARGUS_WITH_NEWEST_BCC={suite} scripts/setup)")
    rows = compilers.check_apart(suite)
    assert not compilers.faults(rows), compiler.name
    programs = [row for row in rows if row["step"] == "program"]
    assert {row["backend"] for row in programs} >= {"perf", "", "stacks before 5.18", "stacks without BTF"}
    assert {"on_switch", "on_sample", "cuda_enter", "torch_enter"} <= {row["program"] for row in programs}
    assert sum(row["step"] in ("probes", "sampler") for row in rows) >= 2


def test_a_program_that_is_refused_is_a_fault() -> None:
    rows = [
        {"step": "program", "program": "on_switch", "backend": "", "loaded": False, "output": "R1 pointer |= pointer"},
        {"step": "sampler", "on": False, "detail": "off-CPU times failed"},
    ]
    assert compilers.faults(rows) == ["on_switch (): R1 pointer |= pointer", "sampler: off-CPU times failed"]
    assert compilers.faults([]) == ["no program was loaded"]
