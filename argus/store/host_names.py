"""Names of the nodes of one run: each has its own, also where containers on several go by the same."""

from __future__ import annotations

from argus.model.errors import ArgusError
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer

MACHINES = """
SELECT DISTINCT machine FROM host_names WHERE run = {run:UInt32} AND host = {host:String}
"""
CLAIM_S = 10.0
"""How long the store may take to keep a name."""


def claim(store: Store, run: int, host: str, machine: str) -> str:
    """Takes a name for a node in a run that several nodes share.

    The claim is stored before others' are read: of two nodes that claim a name at once, one at least sees the other.

    Args:
        store: That of all nodes, with tables.
        run: The run.
        host: What the node calls itself.
        machine: Digits that no other node has.

    Returns:
        The name; with the digits behind it where another node goes by it.

    Raises:
        ArgusError: The store cannot be had.
    """
    writer = Writer(store, source=f"host/{host}")
    writer.append("host_names", {"run": run, "host": [host], "machine": [machine]})
    report = writer.close(timeout_s=CLAIM_S)
    if report.dropped:
        raise ArgusError(f"the name of the node was not stored: {report.last_error}", "See: argus store status")
    machines = query_columns(store, MACHINES, {"run": run, "host": host})["machine"].tolist()
    return host if set(machines) <= {machine} else f"{host}-{machine}"
