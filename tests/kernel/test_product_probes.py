"""The probes on cuBLAS: there when they are of use, and gone where they cost too much."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.probes import Probes
from argus.live.cost import governor
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model.records import Counter
from argus.store.open import open_store
from tests.kernel.conftest import poll_until, wait_for_cuda

pytestmark = pytest.mark.kernel


def seen(tracer: Tracer) -> dict[Counter, int]:
    return tracer.session.probes.counters()


@pytest.mark.parametrize("armed", [True, False])
def test_products_are_probed_while_kernels_are_timed_and_are_not_too_many(
    fakegpu: Path, store_url: str, monkeypatch: pytest.MonkeyPatch, armed: bool
) -> None:
    from run import Job

    with Job(1, ["1000000", "1000"], program=fakegpu / "fake_products", cupti=armed) as job:
        wait_for_cuda(job.pids)
        tracer = Tracer(open_store(store_url), Options(pids=tuple(job.pids), max_overhead=1.0))
        tracer.start()
        try:
            if armed:
                poll_until(tracer, lambda: seen(tracer)[Counter.MATH] > 1000)
                assert tracer.counters()["math_probes_detached"] == (0, True)
                monkeypatch.setattr(governor, "LADDERS", {})
                monkeypatch.setattr(governor, "PROBE_RUNGS", governor.PROBE_RUNGS[:1])
                tracer._budget.overhead.governor.budget = 1e-9
                poll_until(tracer, lambda: tracer.counters()["math_probes_detached"] == (1, True))
                tracer._budget.overhead.governor.budget = 1.0
                assert "cuBLAS and attention are not probed" in tracer.notes()[-1]
            before = seen(tracer)
            poll_until(tracer, lambda: seen(tracer)[Counter.LAUNCHES] > before[Counter.LAUNCHES] + 1000)
            assert seen(tracer)[Counter.MATH] == before[Counter.MATH]
            assert (before[Counter.MATH] > 0) == armed
            lost = tracer.lost()
        finally:
            tracer.stop()
    assert lost == ({"math_probes_detached": 1} if armed else {})


def test_what_calls_another_library_is_probed_first() -> None:
    """cuBLAS hides its calls of cuBLASLt once it is probed; before, they would be products of their own."""
    order: list[str] = []
    probes: Any = SimpleNamespace(
        refused={}, probed=set(), _attach_optional=lambda attachment, subject: order.append(attachment.library.path),
        attachments=[SimpleNamespace(library=SimpleNamespace(path=role, roles=(role,)))
                     for role in ("libcublasLt", "libtorch_cpu", "libcublas")],
        write_prices=lambda: None, _patience=SimpleNamespace(begin=list), _let_window_go=lambda _: None,
    )  # fmt: skip
    assert Probes.attach_optional(probes, "math") == 0
    assert order == ["libtorch_cpu", "libcublas", "libcublasLt"]
