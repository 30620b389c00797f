"""Steps by PyTorch's marks, of versions whose functions have other names and strings: a library of each generation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model import calls
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.kernel

HERE = Path(__file__).parent
ENTER = "_ZN5torch8autograd8profiler25record_function_enter_newE"
NEW = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
EXIT = (
    "_ZN5torch8autograd8profiler{}24record_function_exit_newERKN3c1013intrusive_ptrINS1_20PythonRecordFunctionENS2_"
    "6detail34intrusive_target_default_null_typeIS4_EEEE"
)
BACKWARD = "{}22THPEngine_run_backwardP7_objectS0_S0_"
GENERATIONS = {
    "2.0": (ENTER + "RKSsRKN3c108optionalISsEE", EXIT.format(""), BACKWARD.format("_Z"), "-DOLD_STRING"),
    "2.0, new ABI": (ENTER + NEW + "RKN3c108optionalIS7_EE", EXIT.format(""), BACKWARD.format("_Z")),
    "2.6": (ENTER + "RKSsRKSt8optionalISsE", EXIT.format("L"), BACKWARD.format("_Z"), "-DOLD_STRING"),
    "2.13": (ENTER + NEW + "RKSt8optionalIS7_E", EXIT.format("L"), BACKWARD.format("_ZL")),
}
"""As ``nm`` has them of PyPI's wheels of 2.0.1, 2.6.0 and 2.11.0; the second as g++ 12 mangles it."""


@pytest.mark.parametrize("version", GENERATIONS)
def test_steps_are_those_of_the_program(tmp_path: Path, store_url: str, version: str) -> None:
    enter, leave, backward, *more = GENERATIONS[version]
    library, program, log = tmp_path / "libtorch_cpu.so", tmp_path / "steps", tmp_path / "log"
    names = [f'-DENTER="{enter}"', f'-DEXIT="{leave}"', f'-DBACKWARD="{backward}"', *more]
    flags = ["gcc", "-O2", "-Wall", "-Werror"]
    subprocess.run([*flags, *names, "-shared", "-fPIC", "-o", library, HERE / "pytorch_library.c"], check=True)
    subprocess.run([*flags, "-o", program, HERE / "pytorch_steps.c", library, f"-Wl,-rpath,{tmp_path}"], check=True)

    def done() -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    with subprocess.Popen([program, log], env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"}) as process:
        try:
            wait_until(lambda: done() > 3)
            tracer = Tracer(open_store(store_url), Options(pids=(process.pid,), max_overhead=1.0))
            tracer.start()
            until = done() + 40

            def enough() -> bool:
                tracer.poll()
                return done() > until

            wait_until(enough, timeout_s=60, what="steps")
            hits = tracer.session.probes.hits()
            assert hits[calls.BY_SYMBOL[backward].id] > 30
            assert hits[calls.BY_SYMBOL[calls.symbol_of("backward_begin")].id] == 0  # which has nothing to add
            assert not tracer.stop()
        finally:
            process.kill()
    with open_store(store_url) as store:
        found = query_columns(
            store,
            "SELECT step, toUnixTimestamp64Nano(ts) + toInt64(duration_ns) AS end, toString(method) AS method"
            " FROM iterations ORDER BY step",
        )
        parts = query_columns(store, "SELECT DISTINCT toString(phase) AS phase FROM phases ORDER BY phase")
    assert set(found["method"].tolist()) == {"marks"}
    assert len(found["step"]) >= 30
    steps, ends = np.loadtxt(log, np.int64).T
    theirs = steps[np.searchsorted(ends, found["end"] - tracer.session.mono_offset_ns)]
    assert len(set((theirs - found["step"]).tolist())) == 1
    assert {"data_loading", "backward", "optimizer"} <= set(parts["phase"].tolist())
