"""Instructions of the traced functions, as they lie in their file: where a probe of a function's entry may stand.

The kernel single-steps most instructions that a probe is put on, and emulates a few, for a tenth of the price
(``argus.capture.prices``). So a probe may as well stand on a later instruction of the function's first straight line:
it is reached exactly once a call if nothing jumps to the instructions that were passed over, or to the one under the
probe. iced-x86 decodes them, and says which registers each reads and writes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from argus.capture.process.mapped import File, open_mapped
from argus.capture.process.targets import Library, executable_mappings
from argus.capture.reader import progress, reader

LONGEST = 15
"""Bytes of an x86-64 instruction at most."""
LINE_BYTES = 128
"""How far a probe may be from its function's entry."""
FRAME_WORDS = 1 << 28
"""The stack pointer is followed as long as it is less than so many words of eight bytes below the entry's: 2 GiB, more
than one instruction can take."""
MOST_INSTRUCTIONS = 3000
"""So many of a function are followed at most (some 5 ms); the entry of a longer one is left alone."""
_PART_BYTES = 64 * LONGEST
"""So much is decoded at once."""
REGISTER_ARGUMENTS = 6
"""Integer arguments in registers: System V, x86-64."""
_MOST_FAILED, _MOST_ENDED = 16, 2
"""For so many processes that map a file it is tried in vain to read it; and so many that cost a reader, which may take
seconds each."""
_AT_ONCE = 64
"""Functions that are followed for one question: a third of a second at most."""


class Code:
    """A file of functions that is read here. One that cannot be read has none.

    Args:
        file: It, open. Its owner may cut it short at any time: it is read, never mapped.

    Attributes:
        unread: Whether nobody could be asked for some of it (``RemoteCode``).
    """

    unread = False

    def __init__(self, file: File) -> None:
        self._file = file
        self._places: dict[int, list[Place]] = {}

    def at(self, offset: int, size: int = LONGEST) -> bytes:
        """The bytes there; fewer at the file's end."""
        try:
            return self.read(offset, size)
        except OSError:
            return b""

    def read(self, offset: int, size: int) -> bytes:
        """As ``at``.

        Raises:
            OSError: They cannot be read.
        """
        return self._file.read(size, offset) if 0 <= offset < 1 << 63 else b""

    def look_ahead(self, offsets: Iterable[int]) -> None:
        """``at`` will be asked for these."""

    def follow(self, functions: Iterable[tuple[int, bool]]) -> None:
        """``places`` will be asked for these: entry, and whether it throws."""

    def places(self, entry: int, *, throws: bool) -> list[Place]:
        """As the function of that name, kept: it takes a millisecond, and is asked for twice where exits are probed."""
        if entry not in self._places:
            self._places[entry] = places(self, entry, throws=throws)
        return self._places[entry]


class RemoteCode:
    """As ``Code``, of a file that the reader process reads. Who reads it for a process and gets no answer does not ask
    for that process again, but for the next one that maps the file; when there is none only entries are known.

    Args:
        library: The file.
        others: The same file, as other processes map it.

    Attributes:
        unread: No process is left for which it may be read, and something could not be read.
    """

    def __init__(self, library: Library, *others: Library) -> None:
        self._libraries = deque((library, *others))
        self._failed = self._ended = 0
        self.unread = False
        self._heads: dict[int, bytes] = {}
        self._places: dict[tuple[int, bool], list[Place]] = {}

    def at(self, offset: int) -> bytes:
        """As ``Code.at``."""
        if offset not in self._heads:
            self.look_ahead([offset])
        return self._heads.get(offset, b"")

    def look_ahead(self, offsets: Iterable[int]) -> None:
        """As ``Code.look_ahead``."""
        self._ask([offset for offset in dict.fromkeys(offsets) if offset not in self._heads], [])

    def follow(self, functions: Iterable[tuple[int, bool]]) -> None:
        """As ``Code.follow``."""
        new = [one for one in dict.fromkeys(functions) if one not in self._places]
        for at in range(0, len(new), _AT_ONCE):  # between, others' questions are answered
            self._ask([], new[at : at + _AT_ONCE])

    def places(self, entry: int, *, throws: bool) -> list[Place]:
        """As ``Code.places``."""
        if (entry, throws) not in self._places:
            self.follow([(entry, throws)])
        return self._places.get((entry, throws)) or [Place(entry, self.at(entry))]

    def _ask(self, heads: list[int], functions: list[tuple[int, bool]]) -> None:
        if not (heads or functions):
            return
        ask = partial(reader.shared.ask, "instructions", heads=heads, functions=functions)
        while self._libraries:
            library, before = self._libraries[0], reader.shared.generation
            try:
                answer = ask(library.pid, places=[library.file.fd], device=library.file.device)
                read, found = reader.checked(answer, partial(_instructions, heads, functions))
            except OSError:
                self._next(before)
                continue
            self._heads |= zip(heads, read, strict=True)
            self._places |= zip(functions, found, strict=True)
            return
        self.unread = True

    def _next(self, generation: int) -> None:
        """It could not be read for the first process: the next one is asked for that may be read at all.

        Args:
            generation: The reader's, before it was asked.
        """
        self._failed += 1
        self._ended += reader.shared.generation != generation
        self._libraries.popleft()
        if self._failed >= _MOST_FAILED or self._ended >= _MOST_ENDED:
            self._libraries.clear()
        while self._libraries and not reader.shared.may_ask(self._libraries[0].pid):
            self._libraries.popleft()


def _instructions(
    heads: list[int], functions: list[tuple[int, bool]], answer: reader.Answer
) -> tuple[list[bytes], list[list[Place]]]:
    read = [_code(text) for text in answer.what["heads"]]
    found = [
        [_place(entry, row) for row in rows] for (entry, _), rows in zip(functions, answer.what["places"], strict=True)
    ]
    begins = [places[0].offset for places in found]
    if len(read) != len(heads) or begins != [entry for entry, _ in functions]:
        raise reader.Malformed("instructions")
    return read, found


def _code(text: object) -> bytes:
    return bytes.fromhex(reader.text(text, 2 * LONGEST))


def _place(entry: int, row: list[Any]) -> Place:
    offset, code, below, intact = row
    (ahead,), (words,) = reader.integers([offset - entry], LINE_BYTES), reader.integers([below], FRAME_WORDS)
    return Place(entry + ahead, _code(code), words, frozenset(reader.integers(intact, REGISTER_ARGUMENTS)))


def code_of(library: Library, *others: Library) -> Code | RemoteCode:
    """The functions of a file: read in the reader process, where that has opened it. ``others``: as ``RemoteCode``."""
    return Code(library.file) if isinstance(library.file, File) else RemoteCode(library, *others)


@dataclass(frozen=True)
class Place:
    """An instruction that is executed exactly once in each call of a function, before anything else was called.

    Attributes:
        offset: In the file.
        code: Its bytes.
        below: How far the stack pointer is below the entry's, in words of eight bytes.
        intact: Which of the arguments in registers, from 0, are still in them.
    """

    offset: int
    code: bytes
    below: int = 0
    intact: frozenset[int] = frozenset(range(REGISTER_ARGUMENTS))


def places(code: Code, entry: int, *, throws: bool) -> list[Place]:
    """Where a probe may stand that is to be hit once a call: the entry, and what follows it in the same straight line.

    No memory but the function's own stack frame is written before any of them, so that what arguments point at is
    still what the caller passed.

    Args:
        code: The file.
        entry: Offset of the function's first instruction.
        throws: Whether exceptions may pass the function (C++). Handlers are found by tables that are not read here; so
            if such a function calls anything, nothing but its entry is good.
    """
    first = [Place(entry, code.at(entry))]
    iced = _iced()
    if iced is None:
        return first
    line = _straight_line(iced, code, entry)
    if len(line) < 2:
        return first
    targets = _targets(iced, code, entry, throws)
    if targets is None:
        return first
    inside = [target for target in targets if entry < target <= line[-1].offset]
    end = min(inside, default=line[-1].offset + 1)
    return [place for place in line if place.offset < end]


def _straight_line(iced: Any, code: Code, entry: int) -> list[Place]:
    places: list[Place] = []
    below = 0
    intact = set(range(REGISTER_ARGUMENTS))
    text = code.at(entry, LINE_BYTES)
    information = iced.InstructionInfoFactory()
    for instruction in iced.Decoder(64, text, ip=entry):
        if instruction.is_invalid:
            break
        begin = instruction.ip - entry
        places.append(Place(instruction.ip, text[begin : begin + instruction.len], below, frozenset(intact)))
        if instruction.flow_control != iced.FlowControl.NEXT:
            break
        used = information.info(instruction)
        moved = _moves_stack(iced, instruction, used)
        if moved is None or not 0 <= below - moved < FRAME_WORDS or _writes_elsewhere(iced, used):
            break
        below -= moved
        for register in used.used_registers():
            if _writes(iced, register.access):
                intact.discard(iced.arguments.get(iced.RegisterExt.full_register(register.register)))
    return places


def _writes(iced: Any, access: int) -> bool:
    kinds = iced.OpAccess
    return access in (kinds.WRITE, kinds.COND_WRITE, kinds.READ_WRITE, kinds.READ_COND_WRITE)


def _moves_stack(iced: Any, instruction: Any, used: Any) -> int | None:
    """By how many words an instruction moves the stack pointer up; None: by a number that is not in it."""
    stack = iced.Register.RSP
    if not any(r.register == stack and _writes(iced, r.access) for r in used.used_registers()):
        return 0
    by: int = instruction.stack_pointer_increment  # of push and pop
    if not by:
        # "sub rsp,28h": any other way (and rsp, lea rsp) leads to a frame whose size is not known here.
        verb = str(instruction).partition(" ")[0]
        constant = instruction.op1_kind in (iced.OpKind.IMMEDIATE8TO64, iced.OpKind.IMMEDIATE32TO64)
        if verb not in ("sub", "add") or not constant:
            return None
        value = instruction.immediate(1)
        by = value - (1 << 64) if value >> 63 else value
        by = -by if verb == "sub" else by
    return None if by % 8 else by // 8


def _writes_elsewhere(iced: Any, used: Any) -> bool:
    """Whether memory is written that is not the function's own frame."""
    frame = (iced.Register.RSP, iced.Register.RBP)
    return any(_writes(iced, memory.access) and memory.base not in frame for memory in used.used_memory())


def _targets(iced: Any, code: Code, entry: int, throws: bool) -> set[int] | None:
    """Where the jumps of a function lead, those included that its cold part makes; None: not all can be found."""
    flow = iced.FlowControl
    goes_on = (flow.NEXT, flow.CALL, flow.INDIRECT_CALL, flow.CONDITIONAL_BRANCH)
    targets: set[int] = set()
    seen: set[int] = set()
    waiting = [entry]
    leaves = table = False  # whether it jumps to an address out of a register, and whether that may be a table's
    while waiting:
        at = waiting.pop()
        text = code.at(at, _PART_BYTES)
        for instruction in iced.Decoder(64, text, ip=at):
            if instruction.is_invalid and instruction.ip - at > _PART_BYTES - LONGEST:
                waiting.append(instruction.ip)  # it is cut off here
            if instruction.ip in seen or instruction.is_invalid:
                break
            seen.add(instruction.ip)
            if len(seen) > MOST_INSTRUCTIONS:
                return None
            kind = instruction.flow_control
            if throws and kind in (flow.CALL, flow.INDIRECT_CALL):
                return None
            if kind in (flow.CONDITIONAL_BRANCH, flow.UNCONDITIONAL_BRANCH):
                targets.add(instruction.near_branch_target)
                waiting.append(instruction.near_branch_target)
            elif kind == flow.XBEGIN_XABORT_XEND:
                return None
            elif kind == flow.INDIRECT_BRANCH:
                leaves |= not instruction.is_ip_rel_memory_operand
            # A table of jumps is read with an index; other addresses within a function come from lea.
            table |= instruction.memory_index != iced.Register.NONE
            if instruction.is_ip_rel_memory_operand and str(instruction).startswith("lea "):
                targets.add(instruction.ip_rel_memory_address)
            if leaves and table:
                return None
            if kind not in goes_on:
                break
        else:
            if text:
                waiting.append(at + len(text))
    return targets


def settle() -> None:
    """Loads what decodes instructions."""
    _iced()


@cache
def _iced() -> Any:
    """What is needed of iced-x86, or None if it is not installed.

    Its package imports tables of some thousand names, which takes 0.1 s and 20 MB (``python -X importtime``). Its
    modules alone take 5 ms; so they are imported as those of a package whose own code is not run.
    """
    spec = importlib.util.find_spec("iced_x86")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = types.ModuleType("iced_x86")
    package.__path__ = list(spec.submodule_search_locations)
    whole = sys.modules.get("iced_x86")
    sys.modules["iced_x86"] = whole or package
    try:
        native, *constants = (
            importlib.import_module(f"iced_x86.{name}")
            for name in ("_iced_x86_py", "FlowControl", "OpAccess", "OpKind", "Register")
        )
    except ImportError:
        return None
    finally:
        if whole is None:
            del sys.modules["iced_x86"]
    flow, access, operand, register = constants
    named = (register.RDI, register.RSI, register.RDX, register.RCX, register.R8, register.R9)
    return types.SimpleNamespace(
        Decoder=native.Decoder,
        InstructionInfoFactory=native.InstructionInfoFactory,
        RegisterExt=native.RegisterExt,
        FlowControl=flow,
        OpAccess=access,
        OpKind=operand,
        Register=register,
        arguments={number: place for place, number in enumerate(named)},
    )


BREAKPOINT = b"\xcc"
"""int3, which a uprobe puts in the place of an instruction's first byte (x86-64)."""


def probes_stand(pid: int, file: tuple[str, int], offsets: list[int]) -> bool:
    """Whether a process has probes at some offsets of a file that it maps, at all of those that are mapped, and at
    least at one: in its memory there is a breakpoint, and none in the file.

    Args:
        pid: The process.
        file: Device and inode, as /proc/PID/maps shows them.
        offsets: In the file.
    """
    mappings = [one for one in executable_mappings(pid) if (one.device, one.inode) == file]
    seen = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for offset in offsets:
            for one in mappings:
                if one.offset <= offset < one.offset + one.end - one.start:
                    progress.memory()
                    code = os.pread(memory.fileno(), 1, one.start + offset - one.offset)
                    if code != BREAKPOINT or open_mapped(pid, one).read(1, offset) == BREAKPOINT:
                        return False
                    seen += 1
    return seen > 0


def has_probes(pid: int, file: tuple[str, int], offsets: list[int]) -> bool:
    """As ``probes_stand``, which the reader process does where there is one; false where it cannot be known."""
    try:
        if not reader.shared.on:
            return probes_stand(pid, file, offsets)
        if not reader.shared.reads_memory(pid):
            return False
        answer = reader.shared.ask("probed", pid, device=file[0], inode=file[1], offsets=offsets)
        return bool(reader.checked(answer, lambda answer: answer.what["found"] is True))
    except OSError:
        return False
