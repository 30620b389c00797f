"""Fixtures of several files of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.mapping_process import folder_of_nobody


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of uid 65534's."""
    with folder_of_nobody() as path:
        yield path
