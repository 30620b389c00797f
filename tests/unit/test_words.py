"""Names in the source are for what they hold: none has a part such as ``told`` or ``mine``, which name nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"told", "tell", "tells", "said", "heed", "heeds", "mine"}
"""Parts of names, between underscores. Write what the value is: a report, an index, a mask, a duration."""


def names_of(node: ast.AST) -> Iterator[str]:
    """Names that a node of a syntax tree defines: of functions, classes, parameters, attributes and variables."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname


def misnamed(source: str) -> list[str]:
    """Names with one of :data:`WORDS` in them, and the lines on which they are defined."""
    return [
        f"{getattr(node, 'lineno', 0)}: {name}"
        for node in ast.walk(ast.parse(source))
        for name in names_of(node)
        if WORDS & set(name.lower().split("_"))
    ]


def test_names_say_what_they_hold() -> None:
    found = {}
    for path in sorted([*(ROOT / "argus").rglob("*.py"), *(ROOT / "cli").glob("*.py")]):
        if wrong := misnamed(path.read_text()):
            found[str(path.relative_to(ROOT))] = wrong
    assert not found, "name these for what they hold, not for grammar"


def test_every_kind_of_name_is_seen() -> None:
    source = """
import json as told

class Mine:
    said: int
    def tell(self, heed, *, _told_ns=0):
        self.mine_ns, fine = 1, 2
        try:
            return [telling for tells in fine]
        except OSError as said_so:
            pass
"""
    names = {name.split(": ")[1] for name in misnamed(source)}
    assert names == {"told", "Mine", "said", "tell", "heed", "_told_ns", "mine_ns", "said_so", "tells"}
