"""One store with several jobs, and the page of each, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.report.arrays import unpacked
from argus.report.build import build_page
from argus.report.panel import ArrayRef, Page, Panel
from argus.simulate.mesh import Mesh
from argus.store.open import Store, open_store
from argus.store.reader import latest_run, query_columns
from tests.builders import report_jobs
from tests.stores import new_store


@dataclass(frozen=True)
class Made:
    """A page with its arrays, and the store that it is of."""

    store: Store
    page: Page
    packed: bytes

    def panel(self, ident: str) -> Panel:
        return next(panel for panel in self.page["panels"] if panel["id"] == ident)

    def view(self, ident: str, number: int = 0) -> Any:
        return self.panel(ident)["views"][number]

    def array(self, ref: ArrayRef) -> NDArray[Any]:
        return unpacked(self.packed, ref)

    def rows(self, ident: str, number: int = 0) -> dict[str, NDArray[Any]]:
        """What the query of a panel answers when somebody runs it."""
        return query_columns(self.store, self.panel(ident)["sql"][number]["text"])


Pages = Callable[[str], Made]


@pytest.fixture(scope="session")
def report_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Jobs: ``slow``, ``hung``, ``well`` on two hosts with clocks of their own, ``one`` of one rank, ``extreme``."""
    with open_store(new_store(tmp_path_factory.mktemp("report"))) as store:
        report_jobs.write_slow(store)
        report_jobs.simulate(store, "hung", Mesh(dp=4), "hang", steps=40)
        report_jobs.simulate(store, "well", Mesh(dp=4, per_host=2), steps=40)
        report_jobs.simulate(store, "one", Mesh(dp=1), steps=40)
        report_jobs.write_few_columns(store)
        yield store


@pytest.fixture(scope="session")
def pages(report_store: Store) -> Pages:
    """The page of a job."""
    made: dict[str, Made] = {}

    def page(job: str) -> Made:
        if job not in made:
            built, packed = build_page(report_store, *latest_run(report_store, job))
            made[job] = Made(report_store, built, packed)
        return made[job]

    return page


@pytest.fixture(scope="session")
def slow(pages: Pages) -> Made:
    """The job with a slow GPU."""
    return pages("slow")


def near(value: object, other: object, tolerance: float = 1e-5) -> bool:
    """Whether numbers are equal but for the precision of a float of 32 bits."""
    return bool(np.allclose(np.asarray(value, float), np.asarray(other, float), rtol=tolerance, equal_nan=True))
