"""An HTTP server on the loopback: each answer takes SERVICE_MS, and one in FAIL_EVERY is an error (0: none is).

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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the head and the body are two packets: the second would wait for an ACK, 40 ms

    def do_GET(self) -> None:
        time.sleep(SERVICE_S)
        failed = FAIL_EVERY and next(NUMBERS) % FAIL_EVERY == 0
        body = b"busy\n" if failed else b"hello\n"
        self.send_response(503 if failed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        print("listening", flush=True)
        server.serve_forever()
