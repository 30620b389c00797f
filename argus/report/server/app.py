"""The server as an ASGI application: a handful of routes, of which none reaches a file or a shell.

``/`` and the two files of the front end are read once, when the server starts. ``/api/`` answers from the store:

* ``/api/runs``: the runs of the store.
* ``/api/page?job=&run=&first=&last=``: the page of a run (:class:`argus.report.panel.Page`).
* ``/api/heatmap?job=&run=&measure=&first=&last=``: a measure of its heat map, a column a step.
* ``/api/events?job=&run=&version=``: server-sent events; ``changed`` when there is more to show than in a page of that
  version.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from functools import partial

from anyio import CapacityLimiter, WouldBlock, to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from argus.model.errors import ArgusError
from argus.report.server.access import Access, Guard, answer_error
from argus.report.server.answers import Answers, Asked, asked_for
from argus.system import debug

AT_ONCE = 2
"""Questions for pages that run at the same time, beside one of those who watch: a page of a large job keeps a core busy
for seconds."""
WATCHERS = 64
"""Pages that are kept up to date at the same time."""
LOOK_S = 2.0
"""How often a page that somebody looks at is compared with the store, s: rows come every 2 s."""
BEAT_S = 15.0
"""After so long without news a line is sent all the same: proxies end connections that are silent for 30 to 60 s."""

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}


def make_app(answers: Answers, access: Access, files: dict[str, bytes], *, look_s: float = LOOK_S) -> Starlette:
    """The application.

    Args:
        answers: What it answers.
        access: Who may ask.
        files: The front end: contents by path; ``/`` is the page.
        look_s: How often a page is compared with the store, s.
    """
    limiter = CapacityLimiter(AT_ONCE)
    watchers = CapacityLimiter(WATCHERS)
    versions = _Versions(answers, look_s / 2)

    async def ask(function: Callable[[], bytes | str]) -> bytes | str:
        return await to_thread.run_sync(function, limiter=limiter)

    def answering(make: Callable[[Request], Callable[[], bytes | str]]) -> Callable[[Request], object]:
        async def endpoint(request: Request) -> Response:
            try:
                return Response(await ask(make(request)), media_type="application/json")
            except ArgusError as failure:
                return answer_error(404, failure.message, failure.hint)
            except Exception as failure:
                debug.note(f"serve: {debug.traceback_of(failure)}")
                return answer_error(500, f"this cannot be shown: {type(failure).__name__}", "argus serve --debug")

        return endpoint

    def runs(_: Request) -> Callable[[], bytes]:
        return answers.runs

    def page(request: Request) -> Callable[[], bytes]:
        return partial(answers.page, asked_for(dict(request.query_params)))

    def heatmap(request: Request) -> Callable[[], bytes]:
        given = dict(request.query_params)
        return partial(answers.heatmap, asked_for(given), given.get("measure", "")[:100])

    async def events(request: Request) -> Response:
        given = dict(request.query_params)
        try:
            asked = asked_for(given)
        except ArgusError as failure:
            return answer_error(404, failure.message, failure.hint)

        async def stream() -> AsyncIterator[bytes]:
            known, silent_s = given.get("version", "")[:200], 0.0
            is_first = True
            try:
                watchers.acquire_on_behalf_of_nowait(request)
            except WouldBlock:
                yield _event("trouble", f"{WATCHERS} pages are watched already: close one, or reload by hand")
                return
            try:
                while True:
                    try:
                        version = await versions.of(asked)
                    except ArgusError as failure:
                        version = f"! {failure.message}"
                    except Exception as failure:
                        debug.note(f"serve: {debug.traceback_of(failure)}")
                        version = f"! this cannot be followed: {type(failure).__name__}"
                    if version != known or is_first:
                        event = "trouble" if version.startswith("!") else "changed"
                        if not known or version == known:
                            event = event if event == "trouble" else "watching"
                        known, silent_s, is_first = version, 0.0, False
                        yield _event(event, version)
                    elif silent_s >= BEAT_S:
                        silent_s = 0.0
                        yield b": still there\n\n"
                    await asyncio.sleep(look_s)
                    silent_s += look_s
            finally:
                watchers.release_on_behalf_of(request)

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    app = Starlette(
        routes=[
            *(_static(path, content) for path, content in files.items()),
            Route("/api/runs", answering(runs)),
            Route("/api/page", answering(page)),
            Route("/api/heatmap", answering(heatmap)),
            Route("/api/events", events),
        ],
        middleware=[Middleware(Guard, access=access), Middleware(GZipMiddleware, minimum_size=2_000)],
    )
    app.router.redirect_slashes = False
    return app


def _static(path: str, content: bytes) -> Route:
    """A file of the front end. It is packed once: strangers may ask for it, too."""
    kind = TYPES["html" if path == "/" else path.rpartition(".")[2]]
    zipped, headers = gzip.compress(content, mtime=0), {"vary": "Accept-Encoding"}

    def answer(request: Request) -> Response:
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(content, media_type=kind, headers=headers)
        return Response(zipped, media_type=kind, headers=headers | {"content-encoding": "gzip"})

    return Route(path, answer)


class _Versions:
    """Versions of runs that are watched: the store is asked for each at most every ``fresh_s``, one after the other,
    however many watch. Pages that are being made do not hold them up."""

    def __init__(self, answers: Answers, fresh_s: float) -> None:
        self._answers = answers
        self._fresh_s = fresh_s
        self._limiter = CapacityLimiter(1)
        self._asked: dict[Asked, tuple[float, asyncio.Task[str]]] = {}

    async def of(self, asked: Asked) -> str:
        """The version of a run.

        Raises:
            ArgusError: As :meth:`Answers.version`.
        """
        now = asyncio.get_running_loop().time()
        self._asked = {
            one: (since, task)
            for one, (since, task) in self._asked.items()
            if not task.done() or now - since < self._fresh_s
        }
        if asked not in self._asked:
            question = to_thread.run_sync(partial(self._answers.version, asked), limiter=self._limiter)
            self._asked[asked] = now, asyncio.ensure_future(question)
        # One that goes away does not end it for the others.
        return await asyncio.shield(self._asked[asked][1])


def _event(name: str, text: str) -> bytes:
    """A server-sent event. Its text is one line: a line feed would end it."""
    return f"event: {name}\ndata: {' '.join(text.split())}\n\n".encode("utf-8", "replace")
