"""What the tests of dumps share."""

from __future__ import annotations

import pytest

from argus.store.open import Store


@pytest.fixture(scope="module")
def url(shared: Store) -> str:
    """A store that all tests of a file write to, each a job of its own."""
    return shared.url
