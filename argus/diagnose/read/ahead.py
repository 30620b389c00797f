"""Queries that are begun before their answers are needed: the store reads for the next part of a diagnosis while Python
works on the one before."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy.typing as npt

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query

Columns: TypeAlias = "dict[str, npt.NDArray[Any]]"

AT_ONCE = 2
"""Queries that run at once: each has the cores of the node for itself for most of its time, and its last part, which is
one thread's, leaves room for another one. So the memory of two is in use at most."""


class Ahead:
    """Callable like the query that it is given; :meth:`start` begins one whose answer is asked for later.

    Args:
        query: Runs SQL with parameters, returns columns. May be called by several threads.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="argus-query")
        self._open = True
        self._begun: dict[tuple[str, ...], list[Future[Columns]]] = defaultdict(list)

    def start(self, text: str, params: Mapping[str, Any]) -> None:
        """Begins a query; what fails is raised by the call that asks for the answer. After the end of the ``with`` none
        is begun: whoever reads on asks for each when it is needed."""
        if not self._open:
            return
        self._begun[_key(text, params)].append(self._pool.submit(self._query, text, dict(params)))

    def __call__(self, text: str, params: Mapping[str, Any]) -> Columns:
        begun = self._begun.get(_key(text, params))
        return begun.pop().result() if begun else self._query(text, params)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._pool.shutdown(wait=True, cancel_futures=True)


def _key(text: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    """The query and the values of its parameters; those of its form for several hosts are the same to all."""
    return (text, *(repr(params.get(name)) for name in re.findall(r"\{(\w+):", text)))


def remembered(query: Query) -> Query:
    """Runs those queries once that several parts of a diagnosis ask for, and whose answer is the same to all."""
    answers: dict[str, Columns] = {}

    def run(text: str, params: Mapping[str, Any]) -> Columns:
        if text not in (queries.GROUPS, queries.STATES, queries.LAST_LOOK):
            return query(text, params)
        if text not in answers:
            answers[text] = query(text, params)
        return answers[text]

    return run
