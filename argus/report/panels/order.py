"""The panels of a page, in the order in which they are read. The verdict comes before all of them."""

from __future__ import annotations

from argus.report.panel import PanelModule
from argus.report.panels import (
    communicators,
    coverage,
    critical_path,
    environment,
    flame,
    hang,
    health,
    heatmap,
    history,
    kernels,
    links,
    mesh,
    phases,
    steps,
    waits,
    whatif,
)

PANELS: tuple[PanelModule, ...] = (
    hang, heatmap, mesh, steps, phases, kernels, communicators, links, waits, critical_path, flame, whatif, history,
    health, environment, coverage,
)  # fmt: skip
