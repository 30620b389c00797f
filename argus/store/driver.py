"""The package clickhouse-connect: imported here and nowhere else, when a store is first used (it takes 0.1 s)."""

from __future__ import annotations

import os

_COMPILED = "CLICKHOUSE_CONNECT_USE_C"

# Its compiled reader (1.12.0) reads past the end of an answer that announces more than it has, and the process ends.
# Rows come as Arrow, so that it would save nothing. The variable is asked for when the package is imported.
_kept = os.environ.get(_COMPILED)
os.environ[_COMPILED] = "0"
try:
    import clickhouse_connect as clickhouse_connect
    from clickhouse_connect.driver.exceptions import Error as Error
finally:
    if _kept is None:
        del os.environ[_COMPILED]
    else:
        os.environ[_COMPILED] = _kept
