"""The detectors, in the order in which they are asked (:mod:`argus.diagnose.detector`).

Who comes later knows what was found before: a regression is none where ranks explain it, and the layout is the cause
where no rank is.
"""

from __future__ import annotations

from argus.diagnose.detector import ANY, Entry
from argus.diagnose.iteration import against_baseline, growth, hang, stalls
from argus.diagnose.kernels import distributions
from argus.diagnose.ranks import (
    late_ranks,
    layout,
    layout_change,
    links,
    logged_times,
    lost_lead,
    slow_gpus,
    stage_links,
)

DETECTORS = (
    Entry("hang", hang, last=True),
    Entry("slow_gpus", slow_gpus),
    Entry("logged_times", logged_times),
    Entry("late_ranks", late_ranks),
    Entry("slow_links", links),
    Entry("stage_links", stage_links, unless=("slow_links",)),
    Entry("growth", growth),
    Entry("slow_kernels", distributions),
    Entry("layout", layout, unless=(ANY,)),
    Entry("layout_change", layout_change, only="growth"),
    Entry("stalls", stalls, other_ranks=True),
    Entry("lost_lead", lost_lead, unless=(ANY,)),
    Entry("against_baseline", against_baseline),
)
