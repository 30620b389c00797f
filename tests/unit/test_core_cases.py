"""Which cases of thorough tests scripts/test runs without --all."""

from __future__ import annotations

import os

import pytest

from tests.conftest import beyond_core


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("case", [1, 2, 3])
def test_cases(case: int) -> None:
    """Stands here to be counted below."""


@pytest.mark.thorough
def test_whole() -> None:
    """The same."""


def test_the_first_cases_are_core(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.name for item in items}
    later = {"test_cases[3]", "test_whole"}
    assert {item.name for item in beyond_core(items)} == later & names
    if os.environ.get("ARGUS_CORE"):
        assert not later & names
