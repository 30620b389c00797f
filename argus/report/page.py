"""The page as a file: one HTML document with its data, its program and its style in it, which asks for nothing else.

The program (``web/``, built by ``scripts/web`` into ``static/``) draws what the document says. It may run because its
hash is in the document's policy; nothing else may, whatever the data holds: names of others are text in JSON, in which
no character can end the element that it is in.
"""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
import math
from collections.abc import Iterator
from importlib import resources
from typing import Any

from argus.model.text import harmless, shortened

from .panel import Page

_CHUNK = 3 << 18
"""Bytes that become base64 at once: a multiple of 3, or there would be padding in between."""
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E%3Cpath fill='%23123570' "
    "d='M0 0h8v8H0z'/%3E%3Cpath fill='%23fee838' d='M5 2h2v2H5z'/%3E%3C/svg%3E"
)
_HEAD = """<!doctype html>
<html lang="en" data-source="{source}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="{icon}">
"""
_BODY = '</head>\n<body>\n<div id="argus" aria-busy="true"><div class="first">{first}</div></div>\n'
_NO_SCRIPT = "<noscript><p>The pictures of this page need JavaScript.</p></noscript>"
_END = "</body>\n</html>\n"
NOT_ALL = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
"""How every policy of ours begins."""
SERVED_POLICY = NOT_ALL + "script-src 'self'; style-src 'self'; connect-src 'self'"
"""Of the page that ``argus serve`` gives; as a header it may add ``frame-ancestors 'none'``."""


def asset(name: str) -> bytes:
    """A file of ``static/``: ``page.js``, ``page.css``, ``LICENSES.txt``."""
    return (resources.files("argus.report") / "static" / name).read_bytes()


def html(page: Page, arrays: bytes) -> Iterator[bytes]:
    """The page as one file, in pieces. ``arrays``: what the page's ``ArrayRef`` point into, packed by zlib."""
    script, style = asset("page.js"), asset("page.css")
    policy = NOT_ALL + f"script-src {_hash(script)}; style-src {_hash(style)}"
    title = shortened(f"{page['job']} run {page['run']} · Argus", 200)
    yield _head("file", policy, title).encode()
    yield b"<style>" + style + b"</style>\n"
    # Before the data: a file that is cut off still says so.
    yield b'<script type="module">' + script + b"</script>\n"
    yield _BODY.format(first=_verdict(page)).encode()
    yield b'<script type="application/json" id="argus-page">' + _json(page) + b"</script>\n"
    yield b'<script type="text/plain" id="argus-arrays">'
    yield from _base64(arrays)
    yield b"</script>\n" + _END.encode()


def packed(arrays: bytes) -> str:
    """Arrays (packed by zlib) as answers of ``argus serve`` have them."""
    return b"".join(_base64(arrays)).decode()


def served() -> bytes:
    """The page of ``argus serve``: without data, which it asks for at ``/api``."""
    head = _head("served", SERVED_POLICY, "Argus")
    links = '<link rel="stylesheet" href="/static/page.css">\n<script type="module" src="/static/page.js"></script>\n'
    first = "<noscript><p>This page needs JavaScript.</p></noscript>"
    return (head + links + _BODY.format(first=first) + _END).encode()


def _head(source: str, policy: str, title: str) -> str:
    title = _escaped(title)
    return _HEAD.format(source=source, policy=markup.escape(policy, quote=False), title=title, icon=_ICON)


def _hash(content: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


def _escaped(text: str) -> str:
    return markup.escape(harmless(text))


def _verdict(page: Page) -> str:
    """The verdict as text: what is read before the pictures are drawn, and where they cannot be."""
    verdict = page["verdict"]
    lines = [f"<h1>{_escaped(str(verdict.get('status', '')))}</h1>", f"<p>{_escaped(page['summary'])}</p>"]
    findings: list[dict[str, Any]] = verdict.get("findings") or []
    for finding in findings:
        texts = [str(finding.get("kind", "")).replace("_", " "), str(finding.get("action", ""))]
        lines.append(f"<p>{_escaped(shortened(': '.join(filter(None, texts)), 2000))}</p>")
    return "".join([*lines, _NO_SCRIPT])


def _json(page: Page) -> bytes:
    """ASCII, and nothing in it that HTML takes for markup."""
    try:
        text = json.dumps(page, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number that JSON does not have: not known
        text = json.dumps(finite(page), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").encode()


def finite(value: Any) -> Any:
    """A document without numbers that JSON does not have: they are not known."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _base64(content: bytes) -> Iterator[bytes]:
    view = memoryview(content)
    for begin in range(0, len(view), _CHUNK):
        yield base64.b64encode(view[begin : begin + _CHUNK])
