"""What findings cost by the rebuilt step, where the newest steps are not all alike."""

from __future__ import annotations

import numpy as np
import pytest

from argus.diagnose.detector import Entry, ask
from argus.diagnose.ranks import slow_gpus
from argus.diagnose.whatif import relief
from tests.unit.diagnose.ranks.test_links import Network


@pytest.mark.parametrize("slow", [11, 13, 20])
def test_steps_before_a_gpu_was_slow_do_not_lower_what_it_costs(slow: int) -> None:
    network = Network(4, steps=60)
    network.slow([3], 1.3, 60 - slow)
    case = network.job()
    ask([Entry("slow_gpus", slow_gpus)], case)
    (found,) = case.suspects
    before, since = np.median(case.durations[:-slow]), np.median(case.durations[-slow:])
    assert case.step.now_ns == pytest.approx(since, rel=0.01)
    relief.add(case, case.suspects, case.step.now_ns)
    assert found.slowdown == pytest.approx(since / before, rel=0.02)
    assert found.confidence > 0.9
    assert "would take" in found.further[-1]["text"]
