"""What users read of a store that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from argus.store.driver import Error
from argus.store.failures import explain
from argus.store.url import parse_url


@pytest.mark.parametrize(
    ("there", "what", "hint"),
    [(True, "its engine has ended", "Try again"), (False, "its folder is gone", "Put it back")],
)
def test_an_embedded_engine_that_is_away_is_no_server(tmp_path: Path, there: bool, what: str, hint: str) -> None:
    folder = tmp_path / "store"
    if there:
        folder.mkdir()
    failure = Error(
        "Error HTTPConnectionPool(host='localhost', port=80): Max retries exceeded with url: /?query_id=9 (Caused by "
        "NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))"
    )
    error = explain(failure, parse_url(f"chdb://{folder}"))
    assert error.message == f"cannot reach the store chdb://{folder}: {what}"
    assert error.hint.startswith(hint)
    assert error.exit_code == 3
