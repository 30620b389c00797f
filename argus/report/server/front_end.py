"""What the server sends of the front end, and where its answers come from."""

from __future__ import annotations

from functools import partial
from typing import Any

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.report.arrays import Arrays
from argus.report.build import build_page, look_at
from argus.report.look import Look
from argus.report.page import asset, served
from argus.report.panel import Page
from argus.report.panels import heatmap
from argus.report.server.answers import Answers, Asked, Built
from argus.store.open import Store

FILES = ("page.js", "page.css", "LICENSES.txt")


def front_end() -> dict[str, bytes]:
    """The page and the files that it loads, by path; all there is besides ``/api/``."""
    return {"/": served(), **{f"/static/{name}": asset(name) for name in FILES}}


def answers_of(store: Store) -> Answers:
    """Answers from a store, which is only read."""
    return Answers(store, _build)


def _build(store: Store, asked: Asked) -> Built:
    look = look_at(store, asked.job, asked.run, steps=(asked.first, asked.last), keep=False)
    page, arrays = build_page(store, asked.job, asked.run, live=True, examined=look.examined)
    return Built(page, arrays, partial(_zoom, look, _scales(page)))


def _scales(page: Page) -> dict[str, tuple[float, float]]:
    """What the lowest and the highest colour of each measure stand for."""
    views = [view for panel in page["panels"] for view in panel["views"] if view["view"] == "heatmap"]
    return {measure["key"]: (measure["low"], measure["high"]) for view in views for measure in view["measures"]}


def _zoom(look: Look, scales: dict[str, tuple[float, float]], key: str, first: int, last: int) -> tuple[Any, bytes]:
    arrays = Arrays()
    found = heatmap.zoomed(look.part(first, last), key, *scales[key], arrays) if key in scales else None
    if found is None:
        raise ArgusError(f"the heat map has no '{key}' of these steps", "", EXIT_UNAVAILABLE)
    return found, arrays.packed()
