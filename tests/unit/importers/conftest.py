"""What the tests of importers share."""

from __future__ import annotations

import pytest

from argus.store.open import Store


@pytest.fixture
def url(store: Store) -> str:
    """A store without rows, whose engine runs for all tests of a file."""
    with store.lease() as client:
        # A materialized view fills it. Two tests may store the same run of the same job.
        client.command("TRUNCATE TABLE iteration_rollup")
    return store.url
