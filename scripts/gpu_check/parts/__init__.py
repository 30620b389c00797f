"""The parts of gpu-check, the most important first.

Each is a module with ``run(ctx)``; its docstring's first line is its help.
"""

from __future__ import annotations

ORDER = (
    "machine", "bpf", "kernels", "launches", "overhead", "governor", "profiler", "callers", "fixtures", "clock",
    "robust", "ranks", "health", "volume",
)  # fmt: skip

LIMIT_S = {
    "machine": 40, "bpf": 60, "kernels": 110, "launches": 110, "overhead": 200, "governor": 210, "profiler": 70,
    "callers": 90, "fixtures": 50, "clock": 60, "robust": 80, "ranks": 70, "health": 40, "volume": 20,
}  # fmt: skip
"""The longest that a part may take, s."""

BESIDE = {"profiler", "callers", "fixtures", "ranks"}
"""Parts that measure no times: they may run beside one another."""

REAL_ONLY = {"clock"}
"""Parts that make no sense on the fake GPU."""
