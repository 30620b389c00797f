"""Whether runs have the same workload: mesh, kernels, and what a step does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from argus.compare.comparer import Side
from argus.compare.comparers.speed import common_kernels
from argus.diagnose.read.profile import COMMUNICATION, COMPUTE, Profile

SAME = 0.02
"""By how much what a step does may differ between runs of one workload: an evaluation or a longer batch among many."""
ALIKE = 0.1
"""By how much the work of a rank, or of all, may differ and still be the same at another size."""
UNITS = {"launches": "launches", "collectives": "collective calls", "bytes": "bytes of collectives", "flops": "FLOP"}


@dataclass(frozen=True)
class Scaling:
    """Runs of different sizes.

    Attributes:
        ranks: Before and after.
        work: Work of a rank in a step after, over before: by FLOP where both sides know them, else by launches.
        efficiency: Work a second and rank after, over before: 1 is linear. Of the same work a rank (weak scaling) that
            is the step time before over after; of the same work in all (strong), times ranks before over after.
        weak: The work of a rank stayed.
        eaten: What a rank's step spends more on, ns, by computation, communication and waiting, the most first.
    """

    ranks: tuple[int, int]
    work: float
    efficiency: float
    weak: bool
    eaten: tuple[tuple[str, float], ...]

    @property
    def strong(self) -> bool:
        """The work of all ranks stayed."""
        return not self.weak and self.work == self.ranks[0] / self.ranks[1]


@dataclass(frozen=True)
class Workload:
    """What both sides run.

    Attributes:
        same: It is the same.
        differences: What differs, clauses; of a kernel that is new or gone the comparison has its cost.
        unobserved: What was not observed on both sides, clauses.
        scaling: Sides of different sizes.
        mixed: Why the sides cannot be compared, a clause: runs of one of them have different sizes. Empty: they can.
    """

    same: bool
    differences: tuple[str, ...]
    unobserved: tuple[str, ...]
    scaling: Scaling | None = None
    mixed: str = ""

    @property
    def unknown(self) -> bool:
        """Nothing but the number of ranks was observed on both sides."""
        return self.same and len(self.unobserved) == len(UNITS) + 1


def compare_workloads(before: Side, after: Side) -> Workload:
    """Whether two sides run the same; kernels that few share are another program."""
    differences, unobserved, mixed = [], [], ""
    sizes = [_size(side[0]) for side in (before, after)]
    for side, where in ((before, "before"), (after, "after")):
        if len(each := sorted({_size(profile) for profile in side})) > 1:
            differences.append(f"the runs {where} have different numbers of ranks")
            mixed = mixed or f"{differences[-1]} ({', '.join(f'{size:,}' for size in each)})"
    if sizes[0] != sizes[1]:
        differences.append(f"{sizes[0]} ranks, and {sizes[1]} after")
    meshes = [", ".join(f"{name} {n}" for name, n in sorted(side[0].mesh.items())) for side in (before, after)]
    if not all(side[0].mesh for side in (before, after)):
        unobserved.append("the mesh")
    elif meshes[0] != meshes[1]:
        differences.append(f"mesh {meshes[0]}, and {meshes[1]} after")
    for name, unit in UNITS.items():
        first, second = _work(before, name), _work(after, name)
        if first is None or second is None:
            if name != "flops":
                unobserved.append(unit)
        elif abs(second - first) > SAME * max(first, second):
            differences.append(f"{first:,.0f} {unit} a step, and {second:,.0f} after")
    if all(profile.kernels for profile in (*before, *after)):
        common = common_kernels(before, after)
        spent = sum(one.spent_ns.value for one in before[0].kernels.values())
        shared = sum(before[0].kernels[name].spent_ns.value for name in common) / max(spent, 1.0)
        if shared < 0.5:
            differences.append(f"kernels common to both take only {shared:.0%} of the time")
    else:
        unobserved.append("kernels")
    scaling = _scaling(before, after) if sizes[0] != sizes[1] and not mixed else None
    return Workload(not differences, tuple(differences), tuple(unobserved), scaling, mixed)


def _size(profile: Profile) -> int:
    return profile.world_size or profile.ranks


def _work(side: Side, name: str) -> float | None:
    values = [profile.work[name] for profile in side if name in profile.work]
    return sum(values) / len(values) if values else None


def _scaling(before: Side, after: Side) -> Scaling:
    ranks = _size(before[0]), _size(after[0])
    work = _work_of_a_rank(before, after, ranks)
    step = [_mean(side, lambda one: one.step.value) for side in (before, after)]
    efficiency = step[0] / step[1] * work
    parts = {
        "computation": COMPUTE, "communication": COMMUNICATION, "waiting for input": ("data_loading",),
        "idle": ("idle", "other"),
    }  # fmt: skip
    grown = {}
    for name, phases in parts.items():
        values = [_mean(side, lambda one, phases=phases: one.phase_ns(phases)) for side in (before, after)]  # type: ignore[misc]
        grown[name] = values[1] - values[0] * work
    eaten = tuple(sorted(((name, cost) for name, cost in grown.items() if cost > 0), key=lambda one: -one[1]))
    return Scaling(ranks, work, efficiency, work == 1.0, eaten)


def _work_of_a_rank(before: Side, after: Side, ranks: tuple[int, int]) -> float:
    """After over before. What is nearly the same work of a rank (1), or of all ranks, counts as that."""
    shrunk = ranks[0] / ranks[1]
    work = 1.0
    for name, of_all in (("launches", 1.0), ("flops", shrunk)):
        first, second = _work(before, name), _work(after, name)
        if first and second:
            work = second / first * of_all
    return next((usual for usual in (1.0, shrunk) if abs(work / usual - 1) <= ALIKE), work)


def _mean(side: Side, of: Callable[[Profile], float]) -> float:
    return sum(map(of, side)) / len(side)
