"""Real recordings of few steps: each verdict says where the time goes, and what is worth trying."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.diagnose.stored import diagnose_store
from argus.store.open import Store
from argus.store.reader import latest_run

DATA = Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[4] / "shared" / "data"))
RECORDINGS = {
    "df": ["kineto/df_index_resolver.json.gz"],
    "control": ["kineto/control.json.gz"],
    "nccl": ["kineto/nccl_data.json.gz"],
    "one of two": ["kineto/sampled_rank-1.json.gz"],
    "both": ["kineto/sampled_rank-0.json.gz", "kineto/sampled_rank-1.json.gz"],
    "h100": ["nsys/h100_2gpu_1s.sqlite"],
    "mfu": ["nsys/mfu_2gpu_before.sqlite"],
}


@pytest.mark.thorough(first=1)
@pytest.mark.skipif(not DATA.is_dir(), reason=f"the reference recordings are not at {DATA} (ARGUS_REFERENCE_DATA)")
@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_has_parts_and_advice(shared: Store, name: str) -> None:
    files = [str(DATA / file) for file in RECORDINGS[name]]
    kind = files[0].split("/")[-2]
    assert main(["import", kind, *files, "--job", f"time of {name}", "--store", shared.url]) == 0
    verdict = diagnose_store(shared, *latest_run(shared, f"time of {name}"))
    assert {"gpu", "kernels"} <= {part["part"] for part in verdict["breakdown"]["parts"]}, verdict["reason"]
    assert verdict["breakdown"]["advice"]
