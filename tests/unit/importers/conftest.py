"""What the tests of importers share."""

from __future__ import annotations

import pytest

from argus.store.open import Store


@pytest.fixture
def url(store: Store) -> str:
    """A store without rows, whose engine runs for all tests of a file."""
    return store.url
