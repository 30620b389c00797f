"""Operations of pipeline stages as Parquet, and how the job is split as YAML."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from argus.importers import whatif_parquet
from argus.model.errors import ArgusError
from tests.fuzz import storing
from tests.fuzz.harness import Bytes, joined

ALLOWED = (ArgusError,)
CODE = ["argus.importers.whatif_parquet"]
TOKENS = [b"dp_size: 2\n", b"pp_size", b"tp_size: 0", b"world_size: 4", b": ", b"'", b"#", b"99999999999999999999"]
SECONDS = 4.0


def seeds() -> list[bytes]:
    count = 8
    columns: dict[str, Any] = {
        "step": [n // 4 for n in range(count)], "optype": ["forward", "backward"] * (count // 2),
        "start_ts": [float(n) for n in range(count)], "duration": [0.5] * count, "dp_rank": [0] * count,
        "stage": [n % 2 for n in range(count)], "mb_id": [0] * count,
    }  # fmt: skip
    whole = storing.made(lambda path: pq.write_table(pa.table(columns), path, compression="none"))
    columns |= {"start_ts": [1e9] * count, "step": [2**31 - 1] * count, "stage": [2**31 - 1] * count}
    large = storing.made(lambda path: pq.write_table(pa.table(columns), path, compression="snappy"))
    del columns["stage"], columns["dp_rank"]
    columns |= {"rank": [n % 2 for n in range(count)], "step": [0] * count, "start_ts": [1.0] * count}
    ranked = storing.made(lambda path: pq.write_table(pa.table(columns), path, compression="none"))
    meta = b"trial_name: 'job'\ndp_size: 1\npp_size: 2\n"
    return [joined(text, file) for text in (b"", meta) for file in (whole, large, ranked)]


def run(data: bytes) -> None:
    text, file = Bytes(data).pieces(2)
    nowhere: Any = None
    with (
        storing.as_file(file, "trace.parquet") as path,
        storing.as_file(text, "meta.yaml") as meta,
        storing.dropped(),
    ):
        trace = whatif_parquet.read(path, meta if text else None)
        whatif_parquet.write(nowhere, "job", trace)
        whatif_parquet.median_step_ns(trace)
