"""No function has more than 100 lines and no class more than 500, but those whose reason is written beside them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTION, CLASS = 100, 500
PYTHON = ("argus", "cli", "scripts", "tests")
REASON = "# Over {} lines: "
"""How the comment begins that stands right before one that is longer."""


def test_no_function_or_class_is_too_long_to_read() -> None:
    too_long, no_need = {}, []
    for path in sorted(path for top in PYTHON for path in (ROOT / top).rglob("*.py")):
        source = path.read_text()
        text = ["", *source.splitlines()]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                most = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
                begin = min(part.lineno for part in (node, *node.decorator_list))
                lines = (node.end_lineno or 0) - node.lineno + 1
                name = f"{path.relative_to(ROOT)} {node.name}"
                excused = text[begin - 1].strip().startswith(REASON.format(most))
                if lines > most and not excused:
                    too_long[name] = lines
                elif excused and lines <= most:
                    no_need.append(name)
    assert too_long == {}
    assert no_need == [], "a reason for what is short enough"


def test_no_function_of_a_bpf_program_is_too_long_to_read() -> None:
    too_long = {}
    for path in sorted([*(ROOT / "bpf").glob("*.c"), *(ROOT / "bpf").glob("*.h")]):
        lines, comment, begin = path.read_text().splitlines(), "", 0
        for number, line in enumerate(lines):
            if line.startswith("/*"):
                comment = ""
            if line.startswith(("/*", " *")):
                comment += line
            elif line == "{":
                begin = number
            elif line == "}" and number - begin > FUNCTION and "Over 100 lines: " not in comment:
                too_long[f"{path.name}: {lines[begin - 1]}"] = number - begin
    assert too_long == {}
