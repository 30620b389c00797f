"""Connections of the server: who says nothing, or has no token, cannot keep the others out."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from argus.report.server.access import ALLOWED

CONNECTIONS = 192
"""That are kept at the same time while some of them can be ended; uvicorn refuses requests from 256 on."""


class Connection(H11Protocol):
    """One that is ended for a newer one, once there are :data:`CONNECTIONS`, unless it is answering somebody who may
    read rows. The one that came first is ended first: a request that comes whole is answered before its turn."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began_s = self.loop.time()
        open_ones = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(open_ones) > CONNECTIONS:
            idle = [one for one in open_ones if one is not self and not one.answering_allowed]
            if idle:
                min(idle, key=lambda one: one.began_s).transport.abort()

    @property
    def answering_allowed(self) -> bool:
        """Whether it is answering a request that may read rows."""
        return self.cycle is not None and not self.cycle.response_complete and ALLOWED in self.cycle.scope["state"]
