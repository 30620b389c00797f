"""Rust symbols as people read them: the mangling "v0" (``_R…``, RFC 2603) and what the older one leaves of C++'s."""

from __future__ import annotations

import re
from functools import lru_cache

from argus.capture.process.demangler import shortened

_BASIC = {
    "a": "i8",
    "b": "bool",
    "c": "char",
    "d": "f64",
    "e": "str",
    "f": "f32",
    "h": "u8",
    "i": "isize",
    "j": "usize",
    "l": "i32",
    "m": "u32",
    "n": "i128",
    "o": "u128",
    "p": "_",
    "s": "i16",
    "t": "u16",
    "u": "()",
    "v": "...",
    "x": "i64",
    "y": "u64",
    "z": "!",
}
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_STEPS = 5000
"""References to earlier parts may repeat a name without end."""
_MAX_DEPTH = 200
_MAX_CHARACTERS = 1 << 14
"""Of names and constants in all, references to them included: each of ``_MAX_STEPS`` may repeat a part of thousands."""

_HASH = re.compile(r"::h[0-9a-f]{16}( |$)")
# compiler/rustc_symbol_mangling/src/legacy.rs
_ESCAPE = re.compile(r"\$(SP|BP|RF|LT|GT|LP|RP|C|u[0-9a-f]{1,5})\$")
_ESCAPES = {"SP": "@", "BP": "*", "RF": "&", "LT": "<", "GT": ">", "LP": "(", "RP": ")", "C": ","}


class _Malformed(Exception):
    pass


@lru_cache(maxsize=2048)  # a symbol may have 16 KiB
def demangle_v0(symbol: str) -> str | None:
    """A symbol that begins with ``_R``, as rustc-demangle shows it (and nm, but for hashes of crates and types of
    constants); None: it is none of Rust's."""
    mangled, _, suffix = symbol.partition(".")
    if not re.match(r"_R[A-Z]", mangled) or not mangled.isascii():
        return None
    reader = _Reader(mangled[2:])
    try:
        text = reader.path(in_value=True)
        if reader.at < len(reader.text):
            reader.path(in_value=False)  # the crate that made it
        if reader.at < len(reader.text):
            return None
    except (_Malformed, IndexError, ValueError, OverflowError):
        return None
    return shortened(f"{text}.{suffix}" if suffix and not suffix.startswith("llvm.") else text, symbol)


def strip_legacy(text: str) -> str:
    """A name that C++'s rules made readable, with what Rust's older mangling added taken off; C++'s own unchanged."""
    if not _HASH.search(text):
        return text
    text = re.sub(r"(^|::)_\$", r"\1$", _HASH.sub(r"\1", text))
    text = _ESCAPE.sub(_unescaped, text)
    return text.replace("..", "::")


def _unescaped(match: re.Match[str]) -> str:
    """What an escape stands for; itself where that is no character: half of a surrogate pair is none."""
    character = _ESCAPES.get(match[1])
    if character is not None:
        return character
    code = int(match[1][1:], 16)
    return match[0] if 0xD800 <= code < 0xE000 else chr(code)


class _Reader:
    """Reads one mangled name from left to right; methods are named after the rules of the RFC's grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._steps = 0
        self._depth = 0
        self._lifetimes = 0
        self._characters = 0

    def _take(self) -> str:
        letter = self.text[self.at]
        self.at += 1
        return letter

    def _eat(self, letter: str) -> bool:
        if self.text[self.at : self.at + 1] == letter:
            self.at += 1
            return True
        return False

    def _enter(self) -> None:
        self._steps += 1
        self._depth += 1
        if self._steps > _MAX_STEPS or self._depth > _MAX_DEPTH:
            raise _Malformed

    def _count(self, text: str) -> str:
        self._characters += len(text)
        if self._characters > _MAX_CHARACTERS:
            raise _Malformed
        return text

    def _base62(self) -> int:
        if self._eat("_"):
            return 0
        value = 0
        while not self._eat("_"):
            value = value * 62 + _DIGITS.index(self._take())
        return value + 1

    def _optional(self, tag: str) -> int:
        return self._base62() + 1 if self._eat(tag) else 0

    def _undisambiguated(self) -> str:
        unicode = self._eat("u")
        count = self._take()
        if count not in "0123456789":
            raise _Malformed
        if count != "0":
            while self.text[self.at : self.at + 1].isdigit():
                count += self._take()
        self._eat("_")
        name = self.text[self.at : self.at + int(count)]
        if len(name) != int(count):
            raise _Malformed
        self.at += len(name)
        if unicode:
            # Punycode, with "_" in the place of "-".
            before, _, after = name.rpartition("_")
            name = (f"{before}-{after}" if before else after).encode().decode("punycode")
            name.encode()  # UnicodeEncodeError, a ValueError: it holds half of a surrogate pair
        return self._count(name)

    def _backref(self, read: str, in_value: bool) -> str:
        target = self._base62()
        if target >= self.at - 1:
            raise _Malformed
        back, self.at = self.at, target
        text = self.path(in_value) if read == "path" else self.type() if read == "type" else self.const()
        self.at = back
        return text

    def path(self, in_value: bool) -> str:
        self._enter()
        tag = self._take()
        if tag == "C":
            self._optional("s")
            text = self._undisambiguated()
        elif tag == "N":
            space = self._take()
            before = self.path(in_value)
            number = self._optional("s")
            name = self._undisambiguated()
            if space.isupper():
                kind = {"C": "closure", "S": "shim"}.get(space, space)
                text = f"{before}::{{{kind}{':' + name if name else ''}#{number}}}"
            else:
                text = f"{before}::{name}" if name else before
        elif tag in "MX":
            self._optional("s")
            self.path(in_value=False)
            text = self.type()
            text = f"<{text} as {self.path(in_value=False)}>" if tag == "X" else f"<{text}>"
        elif tag == "Y":
            text = self.type()
            text = f"<{text} as {self.path(in_value=False)}>"
        elif tag == "I":
            before = self.path(in_value)
            text = f"{before}{'::' if in_value else ''}<{', '.join(self._arguments())}>"
        elif tag == "B":
            text = self._backref("path", in_value)
        else:
            raise _Malformed
        self._depth -= 1
        return text

    def _arguments(self) -> list[str]:
        arguments = []
        while not self._eat("E"):
            if self._eat("L"):
                arguments.append(self._lifetime(self._base62()))
            elif self._eat("K"):
                arguments.append(self.const())
            else:
                arguments.append(self.type())
        return arguments

    def _lifetime(self, number: int) -> str:
        if number == 0:
            return "'_"
        depth = self._lifetimes - number
        if depth < 0:
            raise _Malformed
        return f"'{chr(ord('a') + depth)}" if depth < 26 else f"'_{depth}"

    def _binder(self) -> str:
        """Lifetimes that are bound from here on."""
        count = self._optional("G")
        if count > _MAX_DEPTH:
            raise _Malformed
        names = []
        for _ in range(count):
            self._lifetimes += 1
            names.append(self._lifetime(1))
        return self._count(f"for<{', '.join(names)}> ") if names else ""

    def type(self) -> str:
        self._enter()
        tag = self._take()
        if tag in _BASIC:
            text = _BASIC[tag]
        elif tag == "A":
            text = f"[{self.type()}; {self.const()}]"
        elif tag == "S":
            text = f"[{self.type()}]"
        elif tag == "T":
            parts = []
            while not self._eat("E"):
                parts.append(self.type())
            text = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        elif tag in "RQ":
            lifetime = self._base62() if self._eat("L") else 0
            shown = f"{self._lifetime(lifetime)} " if lifetime else ""
            text = f"&{shown}{'mut ' if tag == 'Q' else ''}{self.type()}"
        elif tag in "PO":
            text = f"*{'const' if tag == 'P' else 'mut'} {self.type()}"
        elif tag == "F":
            text = self._function()
        elif tag == "D":
            text = self._dyn()
        elif tag == "B":
            text = self._backref("type", False)
        else:
            self.at -= 1
            text = self.path(in_value=False)
        self._depth -= 1
        return text

    def _function(self) -> str:
        bound = self._lifetimes
        text = self._binder()
        if self._eat("U"):
            text += "unsafe "
        if self._eat("K"):
            abi = "C" if self._eat("C") else self._undisambiguated().replace("_", "-")
            text += f'extern "{abi}" '
        parts = []
        while not self._eat("E"):
            parts.append(self.type())
        returned = self.type()
        self._lifetimes = bound
        return f"{text}fn({', '.join(parts)})" + ("" if returned == "()" else f" -> {returned}")

    def _dyn(self) -> str:
        bound = self._lifetimes
        text = "dyn " + self._binder()
        traits = []
        while not self._eat("E"):
            trait = self.path(in_value=False)
            names = []
            while self._eat("p"):
                names.append(f"{self._undisambiguated()} = {self.type()}")
            if names:
                joined = ", ".join(names)
                trait = f"{trait[:-1]}, {joined}>" if trait.endswith(">") else f"{trait}<{joined}>"
            traits.append(trait)
        self._lifetimes = bound
        if not self._eat("L"):
            raise _Malformed
        lifetime = self._base62()
        return text + " + ".join(traits) + (f" + {self._lifetime(lifetime)}" if lifetime else "")

    def const(self) -> str:
        self._enter()
        tag = self._take()
        if tag == "p":
            text = "_"
        elif tag == "B":
            text = self._backref("const", False)
        elif tag in "abchijlmnostxy":
            negative = self._eat("n")
            digits = ""
            while not self._eat("_"):
                digits += self._take()
            value = int(digits or "0", 16)
            if tag == "b":
                text = "true" if value else "false"
            elif tag == "c":
                text = repr(chr(value))
            else:
                text = self._count(f"{'-' if negative else ''}{value}")
        else:
            raise _Malformed
        self._depth -= 1
        return text
