"""A server with the answers of ``argus serve``, from memory."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from argus.report import page as report_page
from argus.report.panel import Heatmap, Page

TYPES = {"page.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8"}


class StubServer:
    """Serves what its attributes hold; they may change meanwhile."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.runs: list[dict[str, Any]] = []
        self.left_out = 0
        self.page: tuple[Page, bytes] | None = None
        self.name = ""
        """Of the job, where the page has it in another form."""
        self.fine: Callable[[str, int, int], tuple[Heatmap, bytes]] | None = None
        self.asked: list[str] = []
        """Paths with their queries, of the API."""
        self.refused = 0
        self._streams: list[BaseHTTPRequestHandler] = []
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.origin = f"http://127.0.0.1:{self._server.server_address[1]}"

    def changed(self) -> None:
        """Sends the event to all who listen."""
        for stream in self._streams:
            stream.wfile.write(b"event: changed\ndata: {}\n\n")
            stream.wfile.flush()

    def trouble(self, why: str) -> None:
        """Tells all who listen that their run cannot be followed, and why."""
        for stream in self._streams:
            stream.wfile.write(f"event: trouble\ndata: ! {why}\n\n".encode())
            stream.wfile.flush()

    def hang_up(self) -> None:
        """Ends all streams of events."""
        ended, self._ended = self._ended, threading.Event()
        self._streams = []
        ended.set()

    def close(self) -> None:
        self.hang_up()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                server._answer(self)

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        if path == "/":
            self._send(request, report_page.served(), "text/html; charset=utf-8")
        elif path.startswith("/static/") and path[8:] in TYPES:
            self._send(request, report_page.asset(path[8:]), TYPES[path[8:]])
        elif path.startswith("/api/"):
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                self.refused += 1
                self._send(request, b"{}", "application/json", 401)
                return
            self.asked.append(request.path)
            self._api(request, path[5:], dict(urllib.parse.parse_qsl(query)))
        else:
            self._send(request, b"", "text/plain", 404)

    def _api(self, request: BaseHTTPRequestHandler, path: str, values: dict[str, str]) -> None:
        if path == "runs":
            answer = {"store": "chdb:///store", "runs": self.runs, "left_out": self.left_out}
            self._send(request, json.dumps(answer).encode(), "application/json")
        elif path == "events":
            self._stream(request, values.get("version", ""))
        elif path == "page" and self.page and values["job"] == (self.name or self.page[0]["job"]):
            page, arrays = self.page
            answer = {"page": page, "arrays": report_page.packed(arrays), "version": self._version}
            self._send(request, json.dumps(answer).encode(), "application/json")
        elif path == "heatmap" and self.fine:
            heat, arrays = self.fine(values["measure"], int(values["first"]), int(values["last"]))
            self._send(
                request,
                json.dumps({"heatmap": heat, "arrays": report_page.packed(arrays)}).encode(),
                "application/json",
            )
        else:
            answer = {"error": "no such run is stored", "hint": "The list of runs has those that are"}
            self._send(request, json.dumps(answer).encode(), "application/json", 404)

    @property
    def _version(self) -> str:
        return str(id(self.page))

    def _stream(self, request: BaseHTTPRequestHandler, known: str) -> None:
        ended = self._ended
        self._streams.append(request)
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.end_headers()
        event = "watching" if known == self._version else "changed"
        request.wfile.write(f"event: {event}\ndata: {self._version}\n\n".encode())
        request.wfile.flush()
        ended.wait()
        request.close_connection = True

    def _send(self, request: BaseHTTPRequestHandler, content: bytes, kind: str, status: int = 200) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
