"""What looks up a file by its path does not do so by one that a traced process chose, or says why it may."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("live", "capture", "cupti")
"""Those that read what belongs to traced processes."""
FUNCTIONS = {
    "open", "open_file", "mapped.open_file", "io.open", "os.open", "os.stat", "os.listdir", "os.scandir", "os.access",
    "os.walk", "os.path.exists", "os.path.isfile", "os.path.isdir", "os.path.getsize", "os.path.getmtime",
    "os.path.samefile", "np.fromfile", "np.memmap",
}  # fmt: skip
"""What follows a path that it is given."""
METHODS = {
    "open", "read_bytes", "read_text", "exists", "is_file", "is_dir", "stat", "iterdir", "glob", "rglob", "samefile",
}  # fmt: skip
"""The same of a path itself."""
NO_PATHS = {"_Process", "self._calls", "self._processes"}
"""What has such a method and is no path."""
OF_PROCESS = (
    "cgroup|children|comm|environ|cmdline|maps|mem|mountinfo|oom_score_adj|schedstat|stat|statm|status|syscall|ns/pid"
)
OF_THE_KERNEL = re.compile(
    r"/sys/.*|/proc/sys/.*|/proc/(cmdline|cpuinfo|locks|stat)|/proc/self/(fd|fdinfo)/\*"
    rf"|/proc(/(\*|self)(/task(/\*)?)?(/({OF_PROCESS}))?)?"
)
"""Files that the kernel makes, and of a process none that leads to another: not exe, cwd, root, fd, map_files."""
ALLOWED = {
    "capture/blocked.py _system_call": "its folder is /proc/PID/task/TID",
    "capture/host_environment.py": "this machine's /proc and /sys",
    "capture/kernel/bcc.py": "where bcc is installed",
    "capture/kernel/btf.py kernel": "the kernel's own types",
    "capture/kernel/compile.py": "Argus's programs, and what compiles them",
    "capture/prices.py measure": "a file in memory that it has made",
    "capture/probes.py Probes._compile": "Argus's programs",
    "capture/process/cupti.py open_helper": "map_files leads to the mapped file itself",
    "capture/process/elf.py _File.__init__": "a path is of Argus's own files or tests; of a process it is a File",
    "capture/process/elf.py _in_folder": "the root folder of a process, whose paths are resolved inside it",
    "capture/process/environment.py _begin": "its callers name files of /proc/PID that the kernel makes",
    "capture/process/environment.py _limit": "below the cgroups' folder, and no '..'",
    "capture/process/mapped.py": "the one way: it is tested in test_mapped",
    "capture/process/symbols.py Symbols.__init__": "the root folder of a process, kept open",
    "capture/process/targets.py _of_memory": "its callers name files of /proc/PID that the kernel makes",
    "capture/process/targets.py read_program": "exe leads to the file itself",
    "capture/process/threads.py ThreadWatch._tids": "a descriptor of /proc/PID/task",
    "capture/python/interpreter.py _candidates": "exe leads to the file itself",
    "capture/reader/process.py _Reader.file": "exe leads to the file itself; other names are checked",
    "capture/reader/reader.py _Clock.__init__": "schedstat of a process",
    "capture/reader/reader.py _own_file_systems": "Argus's own files",
    "capture/sampler.py StackProbes._compile": "Argus's programs",
    "cupti/arm.py": "what the user of `argus arm` names; no process is traced",
    "cupti/build.py": "Argus's own helper",
    "cupti/declared.py _key": "where cupti-python is installed",
    "cupti/load.py load": "Argus's own helper",
    "live/command.py": "the command that `argus run` starts, as the user it is for",
    "live/preflight.py": "this machine, and libraries of Argus's own process",
}
"""What may look up by another path: a file, or a function of it, and why."""


class Finder(ast.NodeVisitor):
    """Finds look-ups by paths that do not say that the kernel made the file.

    Attributes:
        found: For each the function that does it, and the line.
    """

    def __init__(self, module: ast.Module) -> None:
        self.found: list[tuple[str, int]] = []
        self._where: list[str] = []
        self._values = [self._only_values(module)]
        self.visit(module)

    @staticmethod
    def _only_values(scope: ast.AST) -> dict[str, ast.expr | None]:
        """What names stand for that are assigned to once; None: another one does not stand for one thing."""
        values: dict[str, ast.expr | None] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.arg):
                values[node.arg] = None
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                values[node.id] = None if node.id in values else ast.Constant(None)
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name) and values[target.id]:
                values[target.id] = node.value
        return values

    def _inside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._where.append(node.name)
        self._values.append(self._only_values(node))
        self.generic_visit(node)
        self._where.pop()
        self._values.pop()

    visit_FunctionDef = visit_ClassDef = _inside

    def _shape(self, node: ast.expr) -> str:
        """A path as far as it is written: ``*`` is a part of it that is not, ``?`` anything."""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id="PROC"):
                return "/proc"
            case ast.Name(id=name):
                values = (scope[name] for scope in reversed(self._values) if name in scope)
                return self._shape(value) if (value := next(values, None)) else "?"
            case ast.FormattedValue(value=value) | ast.Call(func=ast.Name(id="str"), args=[value]):
                shape = self._shape(value)
                return "*" if "?" in shape else shape
            case ast.JoinedStr(values=parts):
                return "".join(map(self._shape, parts))
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return f"{self._shape(left)}/{self._shape(right)}"
            case ast.Call(func=ast.Name(id="Path"), args=[path]):
                return self._shape(path)
        return "?"

    def visit_Call(self, node: ast.Call) -> None:
        path = None
        if ast.unparse(node.func) in FUNCTIONS:
            path = node.args[0] if node.args else node
        elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            path = node.func.value if ast.unparse(node.func.value) not in NO_PATHS else None
        in_folder = any(word.arg == "dir_fd" for word in node.keywords)
        if path is not None and not in_folder and not OF_THE_KERNEL.fullmatch(self._shape(path)):
            self.found.append((".".join(self._where), node.lineno))
        self.generic_visit(node)


def test_nothing_is_looked_up_by_a_path_of_a_process() -> None:
    """Whoever adds a look-up finds it here: to open what is mapped is the business of ``mapped``."""
    found, needed = [], set()
    for path in sorted(path for room in ROOMS for path in (ROOT / "argus" / room).rglob("*.py")):
        name = str(path.relative_to(ROOT / "argus"))
        for function, line in Finder(ast.parse(path.read_text())).found:
            reasons = ALLOWED.keys() & {name, f"{name} {function}"}
            needed |= reasons
            if not reasons:
                found.append(f"{name}:{line} {function}")
    assert found == []
    assert sorted(ALLOWED.keys() - needed) == [], "a reason for what is not there"


@pytest.mark.parametrize(
    "text",
    [
        "open(one.path)",
        "open(file=path)",
        "os.open(library.path, os.O_RDONLY)",
        "os.stat(path)",
        "with open('/proc/PID/cwd/data') as file: ...",
        "open(f'/proc/{pid}/cwd/data')",
        "open(f'/proc/{pid}/{name}')",
        "open(f'/proc/{pid}/{name}/status')",
        "os.listdir(f'{PROC}/{pid}/root/tmp')",
        "Path(f'/proc/{pid}/exe').read_bytes()",
        "(PROC / str(pid) / 'root' / path).is_file()",
        "where = PROC / str(pid) / 'cwd'\nwhere.iterdir()",
        "where = '/proc/self/maps'\nwhere = target.exe\nopen(where)",
        "where = '/proc/self/maps'\ndef read(where): open(where)",
        "for where in paths: open(where)",
        "Path.read_bytes(path)",
        "Path(target.exe).open()",
    ],
)
def test_a_look_up_by_any_path_is_found(text: str) -> None:
    assert len(Finder(ast.parse(text)).found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "open(f'/proc/{pid}/maps')",
        "(PROC / str(pid) / 'task' / str(tid) / 'status').read_text()",
        "where = PROC / str(pid)\ndef read(): open(where / 'stat')",
        "os.open('maps', os.O_RDONLY, dir_fd=proc)",
        "os.open(f'/proc/self/fd/{place}', os.O_RDONLY)",
        "os.readlink(f'/proc/{pid}/exe')",
        "Path('/sys/devices/system/cpu/online').read_text()",
    ],
)
def test_what_the_kernel_makes_may_be_read(text: str) -> None:
    assert Finder(ast.parse(text)).found == []
