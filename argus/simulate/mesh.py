"""How a simulated job is split over its ranks, and who talks to whom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argus.model.errors import EXIT_USAGE, ArgusError

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Mesh:
    """Ranks in Megatron's order: tensor parallel runs fastest, then data, then pipeline. Expert parallel ranks are
    neighbours among the data-parallel ones. Arrays over ranks have the shape (pp, dp, tp), which ravels to rank order.

    Attributes:
        dp, tp, pp: Data-parallel, tensor-parallel and pipeline ranks.
        ep: Expert-parallel ranks; divides ``dp``.
        vpp: Model chunks of a stage; more than 1 is the interleaved schedule.
        per_host: Ranks of a host.

    Raises:
        ArgusError: Sizes that do not fit.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    per_host: int = 8

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "ep", "vpp", "per_host"):
            if getattr(self, name) < 1:
                raise ArgusError(f"{name} is {getattr(self, name)}", "Sizes are 1 or more", EXIT_USAGE)
        if self.dp % self.ep:
            raise ArgusError(
                f"expert parallel {self.ep} does not divide data parallel {self.dp}", "Experts are spread over "
                "data-parallel ranks", EXIT_USAGE,
            )  # fmt: skip
        if self.vpp > 1 and self.pp < 2:
            raise ArgusError("an interleaved schedule has two pipeline stages or more", "Give --pp, too", EXIT_USAGE)

    @classmethod
    def of(cls, ranks: int | None, dp: int | None, tp: int, pp: int, ep: int, vpp: int, per_host: int) -> Mesh:
        """A mesh of ``ranks`` ranks; what of ``ranks`` and ``dp`` is None follows from the rest.

        Raises:
            ArgusError: They contradict one another.
        """
        model = max(tp, 1) * max(pp, 1)
        if dp is None:
            if (ranks or model) % model:
                raise ArgusError(f"{ranks} ranks are no multiple of tp x pp = {model}", "Change --ranks", EXIT_USAGE)
            dp = (ranks or model) // model
        if ranks is not None and ranks != dp * model:
            raise ArgusError(f"dp x tp x pp is {dp * model}, not {ranks}", "Leave --ranks or --dp out", EXIT_USAGE)
        return cls(dp, tp, pp, ep, vpp, per_host)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pp, dp, tp)."""
        return self.pp, self.dp, self.tp

    @property
    def size(self) -> int:
        """Ranks."""
        return self.dp * self.tp * self.pp

    @cached_property
    def ranks(self) -> Int:
        """Global ranks, shape (pp, dp, tp)."""
        return np.arange(self.size).reshape(self.shape)

    @cached_property
    def host(self) -> Int:
        """Host number of each rank, shape (ranks,)."""
        return np.arange(self.size) // self.per_host

    @property
    def hosts(self) -> int:
        """Hosts."""
        return int(self.host[-1]) + 1

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, data-parallel rank, tensor-parallel rank) of a rank."""
        stage, rest = divmod(rank, self.dp * self.tp)
        return stage, *divmod(rest, self.tp)

    @cached_property
    def groups(self) -> dict[str, Int]:
        """Communicators of each dimension: shape (groups, members), members in order. A dimension of one rank has none,
        and ``world`` is left out where it is the same as ``dp``."""
        ranks = self.ranks
        groups = {
            "tp": ranks.reshape(-1, self.tp),
            "ep": ranks.reshape(self.pp, self.dp // self.ep, self.ep, self.tp).swapaxes(2, 3).reshape(-1, self.ep),
            "dp": ranks.swapaxes(1, 2).reshape(-1, self.dp),
            "pp": ranks.transpose(1, 2, 0).reshape(-1, self.pp),
            "world": ranks.reshape(1, -1),
        }
        if self.dp == self.size:
            del groups["world"]
        return {name: members for name, members in groups.items() if members.shape[1] > 1}
