"""Load on an HTTP server: asyncio connections that ask again and again, and print what each answer took.

http_load.py PORT [CONNECTIONS [REQUESTS]]
"""

from __future__ import annotations

import asyncio
import sys
import time


async def connection(port: int, requests: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(requests):
        begin = time.perf_counter()
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        took_ms = (time.perf_counter() - begin) * 1e3
        status = head.split(b" ", 2)[1].decode()
        print(f"latency={took_ms:.3f} ms" if status == "200" else f"error: status {status}")
    writer.close()


async def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    port, connections, requests = (*given, *(4, 100)[len(given) - 1 :])
    await asyncio.gather(*(connection(port, requests) for _ in range(connections)))


if __name__ == "__main__":
    asyncio.run(main())
