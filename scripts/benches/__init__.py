"""Benchmarks: one file each."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Result:
    """What a bench measured.

    Attributes:
        title: What was done.
        unit: Of the values.
        rows: Values of each round by what was measured.
        ratio: How much better ours is than the reference; above 1 is better.
        more: Other figures for the JSON.
        plot: Lines that are printed below.
    """

    title: str
    unit: str
    rows: dict[str, list[float]]
    ratio: float
    more: dict[str, float] = field(default_factory=dict)
    plot: list[str] = field(default_factory=list)

    def show(self) -> None:
        width = max(map(len, self.rows))
        print(self.title)
        print(f"{'':<{width}}  {'min':>10} {'median':>10} {'max':>10}   {self.unit}")
        for name, values in self.rows.items():
            print(f"{name:<{width}}  {min(values):>10.4g} {statistics.median(values):>10.4g} {max(values):>10.4g}")
        for name, value in self.more.items():
            print(f"{name}: {value:.4g}")
        print(f"ratio {self.ratio:.1f}")
        print("\n".join(self.plot), end="\n" if self.plot else "")

    def as_json(self) -> dict[str, object]:
        medians = {name: statistics.median(values) for name, values in self.rows.items()}
        return {"ratio": self.ratio, "unit": self.unit, "median": medians, "rounds": self.rows, **self.more}
