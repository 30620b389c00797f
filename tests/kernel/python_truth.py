"""Says whether a Python stack can have been there: call grammars that the programs of ``python_programs`` carry.

A comment at the end of a line says which functions may be called from it:

    down(n - 1)                        # -> down
    sorted(items, key=by_key)          # => by_key
    sum(square(i) for i in range(9))   # => <genexpr>; <genexpr> -> square
    asyncio.run(work())                # => [asyncio selectors] work

``->``: the interpreter runs the function without leaving its loop (from 3.11 on). ``=>``: C code calls it. ``~>``:
either. ``; name ->`` gives the calls of another function on that line, here of the generator expression. A name is
looked up in the same file first, by its qualified name or the end of one. ``[asyncio selectors]``: frames of these
modules of the standard library (``*``: of any), one or more, lie between; of them is only asked that such a function
exists there and has that line. ``$role``: the function that the thread's role names. ``# depth 3-43/2`` after a
``def``: where it may lie, the root of the stack being 1. ``# blocks``: where a thread that is off the CPU for long must
be.

A frame that called another must be on a line with such a comment, and the leaf on any line of its own function. A
comprehension is a function of its own before 3.12. Anything else is wrong.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.GeneratorExp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
)
_ANONYMOUS: dict[type[ast.AST], str] = {
    ast.Lambda: "<lambda>",
    ast.GeneratorExp: "<genexpr>",
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
}
CALLS = re.compile(r"#(?: blocks)? ?(?P<calls>(?:<\w+> )?[-=~]> .*)$")
CLAUSE = re.compile(r"(?:(?P<source>\S+) )?(?P<how>[-=~])> (?:\[(?P<zone>[^]]+)\] ?)?(?P<names>.*)$")
DEPTH = re.compile(r"# depth (\d+)(?:-(\d+))?(?:/(\d+))?")


class Frame(Protocol):
    """As ``argus.capture.python.code.PythonFrame``."""

    @property
    def function(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


@dataclass
class Function:
    """One function of a program: what it is called, its lines, and whom it calls where."""

    qualname: str
    file: str
    first: int
    lines: frozenset[int] = frozenset()
    depths: range | None = None
    calls: dict[int, list[Call]] = field(default_factory=lambda: defaultdict(list))
    blocks: set[int] = field(default_factory=set)
    comprehension: bool = False
    outer: Function | None = None
    zone: tuple[str, ...] = ()

    @cached_property
    def depth_bits(self) -> int:
        """A bit for each depth that it can have."""
        return -1 if self.depths is None else sum(1 << depth for depth in self.depths)

    @cached_property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]


@dataclass
class Call:
    """A line may call this function; ``how``: "-" inside the interpreter, "=" from C, "~" either."""

    how: str
    target: Function | str


@dataclass(frozen=True)
class Judgement:
    """``kind``: "right", "cut" (right as far as it goes, and marked as cut), "unresolved" (right but for frames
    marked as unknown), "wrong"."""

    kind: str
    why: str = ""
    no_line: bool = False


class Grammar:
    """What the stacks of a program can be.

    Args:
        program: the file that runs; announce.py lies beside it.
        version: of the CPython that runs it.
        seen_as: the program's folder as the process sees it, if that differs.
    """

    def __init__(self, program: Path, version: tuple[int, int], seen_as: str | None = None) -> None:
        self.version = version
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.program = f"{seen_as or program.parent}/{program.name}"
        files = [program, program.parent / "announce.py"]
        texts = {f"{seen_as or program.parent}/{path.name}": path.read_text(encoding="utf-8") for path in files}
        for file, text in texts.items():
            self._read_functions(file, text)
        for file, text in texts.items():
            self._read_calls(file, text.splitlines())

    # -- reading

    def _read_functions(self, file: str, text: str) -> None:
        lines = text.splitlines()
        module = Function("<module>", file, 1, frozenset(range(1, len(lines) + 1)))
        self.functions[file].append(module)
        tree = ast.parse(text)
        self._scope(tree.body, module, "", file, lines)
        module.lines = _own(tree, 1, len(lines), lines)

    def _read_calls(self, file: str, lines: list[str]) -> None:
        for number, line in enumerate(lines, 1):
            if "# blocks" in line:
                for function in self.functions[file]:
                    if function.name.startswith("<") and function.outer and number in function.lines:
                        function.blocks.add(number)
                self._innermost(file, number).blocks.add(number)
            if found := CALLS.search(line):
                for clause in found["calls"].split(";"):
                    self._clause(file, number, clause.strip())

    def _scope(self, nodes: Iterable[ast.AST], scope: Function, prefix: str, file: str, lines: Sequence[str]) -> None:
        """Finds the functions among nodes of this scope, and in them."""
        for node in nodes:
            if not isinstance(node, SCOPES):
                self._scope(ast.iter_child_nodes(node), scope, prefix, file, lines)
                continue
            name, first, decorators = _ANONYMOUS.get(type(node), ""), node.lineno, []
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name, decorators = node.name, node.decorator_list
                first = min([first, *(decorator.lineno for decorator in decorators)])
            self._scope(decorators, scope, prefix, file, lines)
            function = Function(prefix + name, file, first, outer=scope, comprehension=isinstance(node, COMPREHENSIONS))
            function.lines = _own(node, first, node.end_lineno or first, lines)
            depth = DEPTH.search(lines[node.lineno - 1])
            if depth and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                low = int(depth[1])
                function.depths = range(low, int(depth[2] or low) + 1, int(depth[3] or 1))
            self.functions[file].append(function)
            # as the compiler names what lies inside: below classes and comprehensions without "<locals>"
            named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            inside = [part for part in ast.iter_child_nodes(node) if part not in decorators]
            self._scope(inside, function, prefix + name + (".<locals>." if named else "."), file, lines)

    def _innermost(self, file: str, line: int) -> Function:
        """The function whose own line this is: not one of an expression's."""
        named = [f for f in self.functions[file] if line in f.lines and not f.name.startswith("<")]
        headers = [f for f in named if f.first != line]
        return max(headers, key=lambda f: f.first, default=self.functions[file][0])

    def _clause(self, file: str, line: int, clause: str) -> None:
        found = CLAUSE.match(clause)
        assert found, f"{file}:{line}: {clause}"
        source = self._anonymous(file, line, found["source"]) if found["source"] else self._innermost(file, line)
        names = found["names"].split()
        targets: list[Function | str] = [self._named(file, line, name) for name in names]
        if found["zone"]:
            zone = Function(f"[{found['zone']}]", "", 0, zone=tuple(found["zone"].split()))
            # any line may go on in the zone or leave it
            zone.calls[0] = [Call("~", zone), *(Call("~", target) for target in targets)]
            targets = [zone]
        inside = [f for f in self.functions[file] if f.comprehension and line in f.lines and _within(f, source)]
        calls = [Call(found["how"], target) for target in targets]
        if inside and self.version < (3, 12):
            source.calls[line] += [Call("~", f) for f in inside if f.outer is source]
            for f in inside:
                deeper = [Call("~", g) for g in inside if g.outer is f]
                f.calls[line] += deeper or calls
        else:
            source.calls[line] += calls

    def _anonymous(self, file: str, line: int, name: str) -> Function:
        found = [f for f in self.functions[file] if f.name == name and line in f.lines]
        assert len(found) == 1, f"{file}:{line}: {len(found)} of {name}"
        return found[0]

    def _named(self, file: str, line: int, name: str) -> Function | str:
        if name == "$role":
            return name
        if name.startswith("<"):
            return self._anonymous(file, line, name)
        for where in [file, *(other for other in self.functions if other != file)]:
            exact = [f for f in self.functions[where] if f.qualname == name]
            ends = exact or [f for f in self.functions[where] if f.qualname.endswith("." + name)]
            if len(ends) == 1:
                return ends[0]
        raise AssertionError(f"{file}:{line}: no single function {name}")

    # -- judging

    def root(self, role: str) -> Function:
        """Where a thread of this role begins."""
        kind = role.partition(":")[0]
        if kind == "spawn":
            zone = Function("[spawn]", "", 0, zone=("<string>", "multiprocessing"))
            zone.calls[0] = [Call("~", zone), Call("~", "$role")]
            return zone
        shared = next(file for file in self.functions if file.endswith("/announce.py"))
        file = self.program if kind == "main" else shared
        name = "<module>" if kind == "main" else "short_thread" if kind == "short" else "thread"
        return next(f for f in self.functions[file] if f.qualname == name)

    def judge(
        self, role: str, frames: Sequence[Frame | None], entries: Sequence[bool] | None = None, *, cut: bool = False
    ) -> Judgement:
        """Whether a thread of this role can have had this stack.

        Args:
            role: "main", "main:FUNCTION", "spawn:FUNCTION" (a process of multiprocessing), "short:FUNCTION" (a thread
                that begins in announce.short_thread) or FUNCTION, for which ``$role`` stands.
            frames: leaf first; None: not known.
            entries: whether C code called each; None: not known.
            cut: the frames nearest to the root are marked as missing.
        """
        if not frames:
            return Judgement("wrong", "no frames")
        rootward = list(frames)[::-1]
        flags = list(entries)[::-1] if entries is not None and self.version >= (3, 11) else [None] * len(rootward)
        # function -> depths that it can have here, as bits
        states: dict[int, tuple[Function, int]] = {}
        if cut:
            for function in itertools.chain(*self.functions.values()):
                if function.depths is not None and self._fits(function, rootward[0]):
                    states[id(function)] = function, function.depth_bits & ~2
        else:
            root = self.root(role)
            states[id(root)] = root, 2
            if flags[0] is False:
                return Judgement("wrong", "the root was not called by C code")
        for at, frame in enumerate(rootward):
            hidden = dict(states) if frame is None and self.version >= (3, 13) else {}
            states = {
                key: (function, bits & function.depth_bits)
                for key, (function, bits) in states.items()
                if bits & function.depth_bits and self._fits(function, frame)
            }
            if not states and not hidden:
                return Judgement("wrong", f"frame {at} from the root, {frame}, cannot be there")
            if at == len(rootward) - 1:
                break
            # a frame that is not known may be CPython's own below an __init__, and is then none
            following: dict[int, tuple[Function, int]] = hidden
            for function, bits in states.values():
                for how, target in self._calls(function, frame, role):
                    flag = flags[at + 1]
                    if flag is None or how == "~" or flag == (how == "="):
                        following[id(target)] = target, bits << 1 | following.get(id(target), (target, 0))[1]
            if not following:
                return Judgement("wrong", f"frame {at} from the root, {frame}, calls nothing, or not in this way")
            states = following
        leaf = rootward[-1]
        if leaf is not None and leaf.line:
            found = [function for function, _ in states.values() if function.zone or leaf.line in function.lines]
            if not found:
                return Judgement("wrong", f"the leaf, {leaf}, is outside its function")
        kind = "cut" if cut else "unresolved" if None in rootward else "right"
        return Judgement(kind, no_line=leaf is not None and not leaf.line)

    def blocks(self, frames: Sequence[Frame | None]) -> bool:
        """Whether a thread with this stack, leaf first, waits where it is supposed to."""
        for frame in frames:
            for function in self.functions[frame.file] if frame else []:
                if self._fits(function, frame):
                    return frame is not None and frame.line in function.blocks
        return False

    def _fits(self, function: Function, frame: Frame | None) -> bool:
        if frame is None:
            return True
        if function.zone:
            return _in_library(frame.file, frame.function, frame.line, function.zone)
        name = function.qualname if self.version >= (3, 11) else function.name
        return frame.function == name and frame.file == function.file

    def _calls(self, function: Function, frame: Frame | None, role: str) -> Iterable[tuple[str, Function]]:
        if function.zone:
            calls = function.calls[0]
        elif frame is None:
            calls = [call for line in function.calls.values() for call in line]
        else:
            calls = function.calls.get(frame.line, [])
        for call in calls:
            if isinstance(call.target, str):
                named = self._named(self.program, 0, role.rpartition(":")[2])
                assert isinstance(named, Function)
                yield call.how, named
            else:
                yield call.how, call.target


def _within(function: Function, scope: Function) -> bool:
    while function.outer is not None:
        if function.outer is scope:
            return True
        if not function.outer.comprehension:
            return False
        function = function.outer
    return False


def _own(node: ast.AST, first: int, last: int, lines: Sequence[str]) -> frozenset[int]:
    """Lines with code of this scope: those of functions and classes in it are theirs, but for their headers."""
    own = {n for n in range(first, last + 1) if lines[n - 1].split("#")[0].strip()}
    for inner in ast.walk(node):
        if inner is not node and isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own -= set(range(inner.body[0].lineno, (inner.end_lineno or 0) + 1)) - {inner.lineno}
    return frozenset(own)


@cache
def _library(file: str) -> dict[str, list[tuple[int, int]]] | None:
    """Names, and qualified names, of a file's functions -> (first line, last line); None: it cannot be read here."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    found["<module>"].append((1, 1 << 30))

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                for name in {child.name, prefix + child.name}:
                    found[name].append((first, child.end_lineno or first))
                visit(child, prefix + child.name + ("." if isinstance(child, ast.ClassDef) else ".<locals>."))
            else:
                visit(child, prefix)

    visit(tree, "")
    return dict(found)


@cache
def _in_library(file: str, name: str, line: int, modules: tuple[str, ...]) -> bool:
    path = Path(file)
    frozen = re.match(r"<frozen ([\w.]+)>$", file)
    words = set(frozen[1].split(".")) if frozen else {*path.parent.parts[-2:], path.stem, file}
    anywhere = frozen or file == "<string>" or "/lib/python3" in file
    if not words & set(modules) and not ("*" in modules and anywhere):
        return False
    known = None if frozen else _library(file)
    if known is None or name.rpartition(".")[2].startswith("<"):
        return True
    return any(not line or first <= line <= last for first, last in known.get(name, []))


class Tally:
    """Samples by verdict, and what was wrong."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self.by_role: dict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: Counter[tuple[str, str]] = Counter()

    def add(self, role: str, judgement: Judgement, count: int = 1) -> None:
        self.samples[judgement.kind] += count
        self.by_role[role][judgement.kind] += count
        if judgement.no_line:
            self.samples["of those without a line"] += count
        if judgement.kind == "wrong":
            self.wrong[role, judgement.why] += count

    def __str__(self) -> str:
        return ", ".join(f"{kind}: {count}" for kind, count in sorted(self.samples.items()))
