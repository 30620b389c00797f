"""Whether a document is as its JSON schema says, and what is wrong with it in a few words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from argus.model.text import named

if TYPE_CHECKING:
    from jsonschema import ValidationError

LARGEST = 1e30
"""Numbers beyond it, which a schema does not bound, are refused: their squares are summed."""


def wrong_in(value: Any, schema: Mapping[str, Any]) -> str:
    """The first thing in which a JSON value is not as its schema says, such as ``runs[3].number is "x", not integer``;
    empty: there is none."""
    from jsonschema import Draft202012Validator  # a tenth of a second

    if place := next(_unbounded(value, ""), ""):
        return f"{place} is not a number that can be used"
    error: ValidationError | None = next(Draft202012Validator(schema).iter_errors(value), None)
    if error is None:
        return ""
    # Of alternatives the one that fits furthest: an object that is wrong inside is no "neither null nor an object".
    while error.context and (inner := max(error.context, key=_depth)) and _depth(inner) > _depth(error):
        error = inner
    return f"{_place(error)} {_words(error)}"


def _unbounded(value: Any, place: str) -> Iterator[str]:
    """Where numbers are beyond :data:`LARGEST`, or none."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _unbounded(one, f"{place}.{named(key)}" if place else named(key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unbounded(one, f"{place}[{number}]")
    elif isinstance(value, (int, float)) and not -LARGEST <= value <= LARGEST:
        yield place or "the document"


def _depth(error: ValidationError) -> int:
    return len(error.absolute_path)


def _place(error: ValidationError) -> str:
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{named(one)}" for one in error.absolute_path)
    return text.removeprefix(".") or "the document"


def _words(error: ValidationError) -> str:
    value: Any = error.instance
    wanted: Any = error.validator_value
    shown = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else _text(value)
    if error.validator == "type":
        return f"is {shown}, not {wanted if isinstance(wanted, str) else ' or '.join(wanted)}"
    if error.validator == "enum":
        return f"is {shown}, not one of {', '.join(map(str, wanted))}"
    if error.validator in ("minItems", "maxItems", "items", "prefixItems"):
        return f"has {len(value)} items"
    if error.validator in ("required", "additionalProperties"):
        return f"is not complete, or has too much: {named(error.message)}"
    return f"is {shown}, which does not fit ({error.validator})"


def _text(value: Any) -> str:
    return named(json.dumps(value, ensure_ascii=False))
