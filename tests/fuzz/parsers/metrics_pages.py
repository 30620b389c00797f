"""A server's page of metrics, of which latencies are read: text in Prometheus' or OpenMetrics' format."""

from __future__ import annotations

import numpy as np

from argus.compare.observe import exposed
from argus.compare.observe.plan import Readings
from argus.model.errors import ArgusError
from tests.fuzz.harness import Bytes, joined

ALLOWED = (ArgusError,)
CODE = ["argus.compare.observe.exposed"]
TOKENS = [b"\n", b'_bucket{le="', b'"} ', b"_sum ", b"+Inf", b"-Inf", b"NaN", b"1e308", b"1e-320", b"0x10", b"1_0",
          b"# TYPE ", b"_seconds", b"_milliseconds", b",", b"{", b"}", b"\xe2\x80\xa8", b"\xd9\xa3"]  # fmt: skip


def seeds() -> list[bytes]:
    page = (
        b'# TYPE a_seconds histogram\na_seconds_bucket{model="m",le="0.1"} %d\na_seconds_bucket{model="m",le="1"} %d\n'
        b'a_seconds_bucket{model="m",le="+Inf"} %d\na_seconds_sum{model="m"} %d\na_seconds_count %d\n'
    )
    other = b'b_bucket{le="5"} 7\nb_bucket{le="+Inf"} 9007199254740992\nb_sum 40.5\n'
    return [
        joined(page % (1, 2, 3, 2, 3), page % (5, 9, 12, 9, 12)),
        joined(page % (5, 9, 12, 9, 12), page % (1, 1, 1, 1, 1)),
        joined(b"", other),
    ]


def run(data: bytes) -> None:
    before, after = (exposed.histograms(page.decode("utf-8", "replace")) for page in Bytes(data).pieces(2))
    readings = Readings(metric="")
    for name in list(after)[:8]:
        values, count, mean = exposed.samples_between(
            before.get(name, exposed.Histogram()), after[name], name, readings
        )
        buckets = len(after[name].counts)
        assert len(values) <= exposed.MOST_SAMPLES + buckets
        assert 0 <= count <= 1 << 53
        assert np.isfinite(values).all()
        assert (np.diff(values) >= 0).all()
        assert mean is None or mean > 0
    if after:
        assert exposed.chosen(after, readings) in after
