"""The order of the rooms under ``argus/``: what may import what, read from the imports of every module.

Imports inside functions and under ``TYPE_CHECKING`` count as well: they tie rooms together as others do.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "system": {"model"},
    "capture": {"model", "system"},
    "cupti": {"model", "system", "capture"},
    "semantics": {"model"},
    "tables": {"model", "capture", "semantics"},
    "compress": {"model"},
    "store": {"model", "system", "semantics"},
    "live": {"model", "system", "capture", "cupti", "semantics", "tables", "compress", "store"},
    "diagnose": {"model", "system", "semantics", "compress", "store"},
    "compare": {"model", "system", "store", "diagnose"},
    "export": {"model", "system", "semantics", "store", "diagnose"},
    "report": {"model", "system", "semantics", "compress", "store", "diagnose", "export"},
    "importers": {"model", "system", "semantics", "tables", "store", "diagnose"},
    "simulate": {"model", "system", "semantics", "tables", "compress", "store"},
    "health": {"model", "system", "store"},
    "cli": {
        "model", "system", "capture", "cupti", "semantics", "store", "live", "diagnose", "compare", "export", "report",
        "importers", "simulate", "health",
    },
}  # fmt: skip
"""Each room, in order, and the rooms that it may import beside itself: all of them stand before it."""
MOST_FILES = 20
"""In one folder, ``__init__.py`` not counted."""
ONE_FILE_A_THING = {"argus/health/checks", "argus/report/panels", "cli"}
"""Folders whose files are a list of alike things: a check, a panel, a verb."""


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(("argus", *parts) if parts[0] == "cli" else parts)
    return name.removesuffix(".__init__")


FILES = {_module(path): path for top in ("argus", "cli") for path in sorted((ROOT / top).rglob("*.py"))}


def room_of(module: str) -> str:
    """The room of a module; empty: the package ``argus`` itself."""
    return module.split(".")[1] if "." in module else ""


def imports_of(source: str, package: str, modules: Mapping[str, object], *, typed: bool = True) -> Iterator[str]:
    """The modules that a source of a package imports, of those that exist; ``argus.x.y`` for ``from argus.x import
    y``. ``typed``: whether those under ``TYPE_CHECKING`` are among them."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not typed and id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            inside = [f"{origin}.{alias.name}" for alias in node.names]
            names = [name if name in modules else origin for name in inside]
        else:
            continue
        yield from (name for name in names if name in modules)


def all_imports(*, typed: bool) -> dict[str, set[str]]:
    found = {}
    for module, path in FILES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found[module] = set(imports_of(path.read_text(encoding="utf-8"), package, FILES, typed=typed)) - {module}
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return all_imports(typed=True)


@pytest.fixture(scope="module")
def running() -> dict[str, set[str]]:
    """Without those for types alone: two parts that hold each other name each other's type."""
    return all_imports(typed=False)


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import one another; empty: none do."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as failure:
        return list(failure.args[1])
    return []


def test_each_room_is_in_the_order_and_imports_only_rooms_before_it() -> None:
    order = list(MAY_IMPORT)
    for room, others in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(room) for other in others), room
    assert {room_of(module) for module in FILES} - {""} == set(order)


def test_the_page_on_the_design_lists_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    layout = page.split("\n## Layout\n")[1].split("\n## ")[0]
    assert re.findall(r"^(?:argus/)?(\w+)/ ", layout.split("\nbpf/")[0], re.MULTILINE) == list(MAY_IMPORT)


def test_no_room_imports_one_that_it_may_not(imports: dict[str, set[str]]) -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in sorted(others)
        if (room := room_of(module)) != room_of(other) and room_of(other) and room_of(other) not in MAY_IMPORT[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_one_another_in_a_circle(running: dict[str, set[str]]) -> None:
    assert not circle_in(running)


def test_a_circle_and_an_import_inside_a_function_are_seen() -> None:
    source = "def f():\n    from argus.b import g\nif TYPE_CHECKING:\n    import argus.c\n"
    source += "from argus import d\nfrom .e import h"
    modules = dict.fromkeys(("argus.b", "argus.c", "argus.d", "argus.e"))
    assert set(imports_of(source, "argus", modules)) == set(modules)
    assert set(imports_of(source, "argus", modules, typed=False)) == set(modules) - {"argus.c"}
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle_in({"a": {"b", "c"}, "b": {"c"}})


def test_no_folder_has_more_files_than_anyone_reads() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in FILES.values():
        counts[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    full = {folder: n for folder, n in counts.items() if n > MOST_FILES and folder not in ONE_FILE_A_THING}
    assert not full


def test_cli_has_one_import_name() -> None:
    """``argus.cli``: under two names its modules would be loaded twice."""
    found = []
    for top in ("argus", "cli", "tests", "scripts"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [str(node.module)]
                found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] == "cli"]
    assert not found


def misplaced(tests: Path) -> list[str]:
    """Unit tests of a module that are not in the folder that mirrors the module's; relative to ``tests``."""
    wrong = []
    for path in sorted(tests.rglob("test_*.py")):
        room, *folders = path.relative_to(tests).parts[:-1] or ("",)
        top = ROOT / room if room in ("cli", "scripts") else ROOT / "argus" / room
        module = path.name.removeprefix("test_")
        if room and any(top.rglob(module)) and not top.joinpath(*folders, module).exists():
            wrong.append(str(path.relative_to(tests)))
    return wrong


def test_unit_tests_mirror_the_tree() -> None:
    assert misplaced(ROOT / "tests" / "unit") == []


def test_a_test_in_another_folder_than_its_module_is_found(tmp_path: Path) -> None:
    for name in ("live/test_governor.py", "live/cost/test_budget.py", "live/test_roster.py", "live/test_no_module.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert misplaced(tmp_path) == ["live/test_governor.py"]
