"""An HTTP server on the loopback: each answer takes SERVICE_MS, and one in FAIL_EVERY is an error (0: none is). What
answers took is at /metrics, as Prometheus reads it.

http_server.py PORT
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE_S = float(os.environ.get("SERVICE_MS", "2")) / 1e3
FAIL_EVERY = int(os.environ.get("FAIL_EVERY", "0"))
NUMBERS = itertools.count(1)
BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, float("inf"))
TOOK: list[float] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the head and the body are two packets: the second would wait for an ACK, 40 ms

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(200, metrics().encode())
            return
        begun = time.monotonic()
        time.sleep(SERVICE_S)
        failed = FAIL_EVERY and next(NUMBERS) % FAIL_EVERY == 0
        TOOK.append(time.monotonic() - begun)
        self.answer(503 if failed else 200, b"busy\n" if failed else b"hello\n")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def metrics() -> str:
    took = list(TOOK)
    lines = ["# TYPE request_seconds histogram"]
    for bound in BOUNDS:
        limit = "+Inf" if bound == float("inf") else str(bound)
        lines.append(f'request_seconds_bucket{{path="/",le="{limit}"}} {sum(one <= bound for one in took)}')
    return "\n".join([*lines, f'request_seconds_sum{{path="/"}} {sum(took)}', f"request_seconds_count {len(took)}", ""])


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        print("listening", flush=True)
        server.serve_forever()
