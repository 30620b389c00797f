"""Command lines of others, in which secrets are replaced before they are stored and shown."""

from __future__ import annotations

from argus.model.text import harmless, printable
from argus.system import redact
from tests.fuzz.harness import is_text

ALLOWED = ()
CODE = ["argus.system.redact", "argus.model.text"]
TOKENS = [b"\0", b"--", b"--api-key", b"=", b"-p", b"://", b"@", b"?token=", b"Bearer ", b"eyJ", b"hf_", b"-----BEGIN ",
          b"***", b"  ", b"--redact"]  # fmt: skip


def seeds() -> list[bytes]:
    return [
        b"python3\0train.py\0--api-key\0V3ry\0--lr\x001e-4",
        b"sh\0-c\0HF_TOKEN=hf_0123456789012345678901 python train.py --password X https://u:p@host/?sig=abc",
        b"mysql\0-u\0root\0-psecret\0-h\0db",
        b"curl\0-H\0Authorization: Bearer abcdefghijkl\0-u\0user:password\0https://host",
        b't2.sh\0--export=ALL,A_KEY=X\0{"password": "X"}\0--header=X-Api-Key: X\0-u\0bob:X\0git+https://X@host',
        b"/opt/py/bin/python3\0-m\0torch.distributed.run\0/home/alice/train.py",
    ]


def run(data: bytes) -> None:
    words = [word.decode(errors="replace") for word in data.split(b"\0")]
    line = redact.command_line(words)
    is_text(line, redact.MAX_CHARS)
    assert len(redact.redacted(words)) <= len(words)
    for what in ((), ("arguments",), ("paths",), redact.MORE):
        is_text(redact.more(line, what), redact.MAX_CHARS + 8)
    redact.quoted(words)
    assert printable(line).isprintable()
    harmless(line)
