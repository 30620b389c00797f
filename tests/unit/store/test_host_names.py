"""Nodes of one name in one run."""

from __future__ import annotations

from pathlib import Path

from argus.store.host_names import claim
from argus.store.open import open_store
from tests.stores import new_store


def test_the_second_node_of_a_name_gets_another_and_the_first_keeps_it(tmp_path: Path) -> None:
    with open_store(new_store(tmp_path)) as store:
        assert claim(store, 7, "worker", "aaaaaa") == "worker"
        assert claim(store, 7, "worker", "bbbbbb") == "worker-bbbbbb"
        assert claim(store, 7, "worker", "cccccc") == "worker-cccccc"
        assert claim(store, 7, "other", "bbbbbb") == "other"
        # Another run, and the same node once more.
        assert claim(store, 8, "worker", "bbbbbb") == "worker"
        assert claim(store, 8, "worker", "bbbbbb") == "worker"
