"""Who may ask the server what: tokens, names of the host, and what a browser is allowed to do with the answers."""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@]+))(?::[0-9]{1,5})?", re.IGNORECASE)
"""``Host`` of a request: an address in brackets or a name, and perhaps a port."""
API = "/api/"
"""What is below it needs the token; all else is the same for everybody and says nothing of any job."""
MOST_TOKEN = 512
"""Characters of a token."""
ALLOWED = "argus_allowed"
"""In the state of a request that may read rows."""

HEADERS = {
    # Scripts and styles come from this server alone, none from data; nothing is loaded from, sent to, or framed by
    # anybody else.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""Of every answer. Rows of a store are kept in no cache, on disk or between."""


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address. A name that is not ``localhost`` counts as reachable."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        token: What ``Authorization: Bearer`` has to hold; empty: nobody is asked for one.
        loopback: The server listens on loopback only, so that other names for it are refused.
    """

    token: str
    loopback: bool

    def allows(self, headers: Headers) -> bool:
        """Whether a request may read rows."""
        if not self.token:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip()[: MOST_TOKEN + 1].encode("utf-8", "replace"), self.token.encode()
        )

    def known_as(self, host: str) -> bool:
        """Whether the server goes by the name that a request has for it. On loopback another name is a page of
        somebody else whose name was made to point here (DNS rebinding); an address cannot be made to."""
        if not self.loopback:
            return True
        named = _HOST.fullmatch(host)
        return named is not None and is_loopback((named[1] or named[2]).lower())


class Guard:
    """ASGI middleware: refuses who may not ask, and puts :data:`HEADERS` on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # No web sockets: an upgrade that nobody asked for is not answered.
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        refused: JSONResponse | None = None
        if not self.access.known_as(headers.get("host", "")):
            refused = answer_error(421, "this server has another name", "Open it as localhost")
        elif scope["path"].startswith(API) and not self.access.allows(headers):
            refused = answer_error(401, "the token is missing or wrong", "Open the address that argus serve printed")
            refused.headers["www-authenticate"] = "Bearer"
        elif scope["path"].startswith(API):
            scope.setdefault("state", {})[ALLOWED] = True
        await (self.app if refused is None else refused)(scope, receive, send_guarded)


def answer_error(status: int, error: str, hint: str = "") -> JSONResponse:
    """What a browser or script gets where something went wrong."""
    return JSONResponse({"error": error, "hint": hint}, status_code=status)
