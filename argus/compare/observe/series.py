"""One figure of repeated runs, as arrays: what the rule decides over."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class Series:
    """A figure of the runs that succeeded, in the order of execution.

    Attributes:
        name: Of the figure, such as ``wall_ns``.
        values: Shape (n,), above 0; larger is worse.
        positions: Shape (n,): each run's number in the order of execution, failed ones counted.
        arms: Shape (n,): which of ``arm_names`` a run belongs to.
        arm_names: By number.
        disturbance: What the machine did besides, by name: shape (n,), nan where unknown; larger is worse.
        samples: By run, single latencies or steps within it; empty where none are known.
        growth: Shape (n,): logarithm of the median of each run's last third of samples over that of the first; nan
            where unknown; empty: of none is it known.
        primary: Whether equivalence is asked of this figure. Of others only that nothing stands out.
        arms_compared: Whether arms that differ in it are a sign.
    """

    name: str
    values: Array
    positions: Numbers
    arms: Numbers
    arm_names: tuple[str, ...] = ("",)
    disturbance: Mapping[str, Array] = field(default_factory=dict)
    samples: Sequence[Array] = ()
    growth: Array = field(default_factory=lambda: np.empty(0))
    primary: bool = True
    arms_compared: bool = True

    def __len__(self) -> int:
        return len(self.values)

    def logs(self) -> Array:
        """Natural logarithms of the values."""
        return np.asarray(np.log(np.maximum(self.values, 1e-300)), np.float64)

    def residuals(self) -> Array:
        """Logarithms less the median of their arm's: 0.05 is 5 % slower than the arm usually is."""
        logs = self.logs()
        for arm in np.unique(self.arms):
            inside = self.arms == arm
            logs[inside] -= np.median(logs[inside])
        return logs

    def df(self) -> int:
        """Degrees of freedom of the spread within arms."""
        return len(self) - len(np.unique(self.arms))

    def spread(self) -> float:
        """Standard deviation of the logarithms within arms, which is the coefficient of variation where it is small."""
        logs = self.logs()
        squares = sum(float(((part - part.mean()) ** 2).sum()) for part in self.by_arm(logs).values())
        return float(np.sqrt(squares / self.df())) if self.df() > 0 else float("nan")

    def by_arm(self, values: Array) -> dict[int, Array]:
        """The values of each arm that has any."""
        return {int(arm): values[self.arms == arm] for arm in np.unique(self.arms)}

    def subset(self, keep: NDArray[np.bool_]) -> Series:
        """The runs of a mask, shape (n,)."""
        samples = [one for one, kept in zip(self.samples, keep, strict=True) if kept] if self.samples else ()
        return replace(
            self, values=self.values[keep], positions=self.positions[keep], arms=self.arms[keep], samples=samples,
            growth=self.growth[keep] if len(self.growth) else self.growth,
            disturbance={name: one[keep] for name, one in self.disturbance.items()},
        )  # fmt: skip

    def without(self, slope: float, cause: Array) -> Series:
        """The values as they would be without a cause that lengthens their logarithm by ``slope`` times itself."""
        return replace(self, values=np.exp(self.logs() - slope * (cause - np.min(cause))))


def arm_numbers(names: Sequence[str]) -> Array | None:
    """The one number in which arms' names differ (workers=1, workers=8), shape (arms,); None: they differ in more."""
    if len(names) < 2:
        return None
    parts = [re.split(r"(\d+(?:\.\d+)?)", name) for name in names]
    if len({len(part) for part in parts}) != 1:
        return None
    differ = [at for at in range(len(parts[0])) if len({part[at] for part in parts}) > 1]
    if len(differ) != 1 or differ[0] % 2 == 0:
        return None
    return np.array([float(part[differ[0]]) for part in parts])
