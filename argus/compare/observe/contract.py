"""Whether a document is as its JSON schema says: the keywords that the schemas beside this file use, and no others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from argus.model.text import named

LARGEST = 1e30
"""Numbers beyond it are none: their squares are summed."""
KEYWORDS = frozenset({
    "type", "const", "enum", "anyOf", "minimum", "maximum", "items", "prefixItems", "minItems", "maxItems", "required",
    "properties", "additionalProperties",
})  # fmt: skip
"""What is checked. ``$schema``, ``$id``, ``title`` and ``description`` say nothing about a value."""
_TYPES: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "object": ("an object", dict), "array": ("a list", list), "string": ("text", str),
    "boolean": ("true or false", bool), "null": ("null", type(None)), "integer": ("a whole number", int),
    "number": ("a number", (int, float)),
}  # fmt: skip


def wrong_in(value: Any, schema: Mapping[str, Any], place: str = "") -> str:
    """The first thing in which a JSON value is not as its schema says, such as ``runs[3].number is "x", not a whole
    number``; empty: there is none."""
    return next(_faults(value, schema, place), "")


def _faults(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if "anyOf" in schema:
        fitting = [one for one in schema["anyOf"] if _is_of(value, _types(one))]
        if fitting:
            yield from _faults(value, fitting[0], place)
        else:
            yield _is_not(value, [name for one in schema["anyOf"] for name in _types(one)], place)
        return
    types = _types(schema)
    if types and not _is_of(value, types):
        yield _is_not(value, types, place)
        return
    if "const" in schema and value != schema["const"]:
        yield f"{_subject(place)} is {_shown(value)}, not {_shown(schema['const'])}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{_subject(place)} is {_shown(value)}, not one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, Mapping):
        yield from _in_object(value, schema, place)
    elif isinstance(value, list):
        yield from _in_list(value, schema, place)
    elif isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        bounds = [f"{word} {schema[key]:,}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
        yield f"{_subject(place)} is {_shown(value)}: it must be {' '.join(bounds)}"


def _in_object(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{_subject(place)} has no {key}"
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for key, one in value.items():
        inner = f"{place}.{named(key)}" if place else named(key)
        if key in known:
            yield from _faults(one, known[key], inner)
        elif others is False:
            yield f"{_subject(place)} has '{named(key)}', which means nothing there"
        else:
            yield from _faults(one, others, inner)


def _in_list(value: Sequence[Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        yield f"{_subject(place)} has {len(value)} items"
        return
    first, rest = schema.get("prefixItems", ()), schema.get("items", {})
    for number, one in enumerate(value):
        yield from _faults(one, first[number] if number < len(first) else rest, f"{place}[{number}]")


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    types = schema.get("type", ())
    return [types] if isinstance(types, str) else types


def _is_of(value: Any, types: Sequence[str]) -> bool:
    for name in types:
        if isinstance(value, bool) != (name == "boolean") or not isinstance(value, _TYPES[name][1]):
            continue
        if not isinstance(value, (int, float)) or -LARGEST <= value <= LARGEST:
            return True
    return False


def _is_not(value: Any, types: Sequence[str], place: str) -> str:
    return f"{_subject(place)} is {_shown(value)}, not {' or '.join(_TYPES[name][0] for name in types)}"


def _subject(place: str) -> str:
    return place or "the document"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return _TYPES["object" if isinstance(value, dict) else "array"][0]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return "a number of many digits"
    return named(json.dumps(value, ensure_ascii=False))
