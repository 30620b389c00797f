"""What must not leave a site with an observation: users, homes, hosts, addresses, values of variables, secrets."""

from __future__ import annotations

import ipaddress
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from argus.compare.observe import records
from argus.compare.observe.evaluate import metrics_of
from argus.compare.observe.plan import from_document, to_yaml
from argus.compare.observe.report import report_of
from argus.compare.observe.series import arm_numbers
from argus.system.redact import REDACTED, in_text, redacted

_HOME = re.compile(r"(?<![\w.-])(?:/(?:home|Users|export/home|usr/home)/[^/\s:'\",;()\[\]]+|/root(?![\w.-]))")
_TILDE = re.compile(r"(?<![\w~/])~[A-Za-z_][\w.-]*")
_ADDRESS_4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)|(?<![A-Za-z\d])ip(?:-\d{1,3}){4}(?!\d)")
_ADDRESS_6 = re.compile(
    r"(?<![0-9A-Za-z:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:(?<=:\d)\d{0,2}(?:\.\d{1,3}){3}"
    r"|(?<=:\d\d)\d?(?:\.\d{1,3}){3}|(?<=:\d\d\d)(?:\.\d{1,3}){3})?(?:%\w+)?"
)
_CARD = re.compile(r"(?<![0-9A-Za-z:-])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}(?![0-9A-Za-z:-])")
_ASSIGNMENT = re.compile(r"(?<![\w.-])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s'\",;]+)")
_UNIQUE = ("host.boot", "nic.digest", "topology.digest")
"""Facts that name one machine, and nothing that matters."""
_LEAST_NAME = 2
"""Characters of a name that is looked for within texts; a shorter one is only replaced where it is the whole text."""


class Sanitizer:
    """Replaces what may identify somebody, in texts.

    Args:
        users, hosts, homes: Names that are known: of whoever measured, and of whoever exports.
    """

    def __init__(self, users: Iterable[str], hosts: Iterable[str], homes: Iterable[str]) -> None:
        parts = [*hosts]
        parts += [one.partition(".")[0] for one in parts]
        self._names = [
            *((home.rstrip("/"), "~") for home in _longest_first(homes) if len(home.rstrip("/")) > 1),
            *((one, "host") for one in _longest_first(parts)),
            *((one, "user") for one in _longest_first(users)),
        ]

    def text(self, text: str, *, assignments: bool = True) -> str:
        """A text without all of that. ``assignments``: whether NAME=VALUE loses its value."""
        text = in_text(text)
        if assignments:
            text = _ASSIGNMENT.sub(rf"\1={REDACTED}", text)
        for name, instead in self._names:
            if text == name:
                return instead
            if len(name) >= _LEAST_NAME:
                edge = r"(?![\w.-])" if instead == "~" else r"(?![^\W_])"
                text = re.sub(rf"(?<![^\W_]){re.escape(name)}{edge}", instead, text, flags=re.IGNORECASE)
        text = _TILDE.sub("~", _HOME.sub("~", text))
        text = _CARD.sub("card", text)
        text = _ADDRESS_6.sub(_address, text)
        return _ADDRESS_4.sub(_address, text)

    def value(self, value: Any) -> Any:
        """A JSON value without it: keys and texts, at any depth."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(one) for one in value]
        return value


def _longest_first(names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name}, key=lambda name: (-len(name), name))


def _address(match: re.Match[str]) -> str:
    """``address`` for what is one; what only looks like one, such as a time of day, stays."""
    text = match[0].partition("%")[0]
    if text.startswith("ip"):
        return "address"
    if ":" not in text:
        return "address" if all(int(part) < 256 for part in text.split(".")) else match[0]
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return match[0]
    return "address" if text != "::" else match[0]


def sanitized(stored: records.Stored, sanitizer: Sanitizer) -> records.Stored:
    """What a folder holds, without it. Values of arms' variables go as a whole; of arms' names numbers in which they
    differ stay, as those are what was compared."""
    meta = {key: value for key, value in stored.meta.items() if key not in ("user", "host", "home", "folder")}
    meta["facts"] = {name: value for name, value in (meta.get("facts") or {}).items() if name not in _UNIQUE}
    arms = stored.config["arms"]
    names = dict(zip(arms, _arm_names(list(arms), sanitizer), strict=True))
    config: dict[str, Any] = {key: value for key, value in stored.config.items() if key not in ("command", "arms")}
    for key in ("latency", "errors", "retries"):  # latency=([0-9.]+) assigns nothing
        config[key] = _patterns(config[key], sanitizer)
    if config["server"] is not None:
        config["server"] = sanitizer.value(config["server"])
    config["trace"] = sanitizer.text(config["trace"] or "") or None
    config["command"] = [sanitizer.text(word) for word in redacted(stored.config["command"])]
    config["arms"] = {names[arm]: dict.fromkeys(map(sanitizer.text, values), REDACTED) for arm, values in arms.items()}
    plan = from_document(config, records.CONFIG)
    runs = [{**sanitizer.value(run), "arm": names.get(run["arm"], run["arm"])} for run in stored.metrics["runs"]]
    for run in runs:
        run["output"] = dict.fromkeys(run["output"])
    metrics = metrics_of(runs, plan, decided=stored.metrics["decision"] is not None)
    metrics = {"schema": records.METRICS_SCHEMA, **metrics}
    return records.Stored(metrics, {**sanitizer.value(meta), "sanitized": True}, config, plan)


def _patterns(value: Any, sanitizer: Sanitizer) -> Any:
    if isinstance(value, Mapping):
        return {key: _patterns(one, sanitizer) for key, one in value.items()}
    return sanitizer.text(value, assignments=False) if isinstance(value, str) else value


def _arm_names(names: Sequence[str], sanitizer: Sanitizer) -> list[str]:
    """Arms' names without what may identify somebody, each another one."""
    numbered = arm_numbers(names) is not None
    found: list[str] = []
    for name in names:
        clean = sanitizer.text(name, assignments=not numbered)
        while clean in found:
            clean += "+"
        found.append(clean)
    return found


def write_zip(file: BinaryIO, stored: records.Stored, outputs: Mapping[str, Path]) -> list[str]:
    """Writes an archive of the documents, of a report made from them, and of further files; returns their names."""
    texts = {
        records.METRICS: records.to_json(stored.metrics),
        records.META: records.to_json(stored.meta),
        records.CONFIG: to_yaml(stored.config),
        records.REPORT: report_of(stored.metrics, stored.meta, stored.plan),
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(_entry(name), text.encode(errors="backslashreplace"))
        for name, path in outputs.items():
            with archive.open(_entry(name), "w") as entry, path.open("rb") as source:
                while piece := source.read(1 << 20):
                    entry.write(piece)
    return [*texts, *outputs]


def _entry(name: str) -> zipfile.ZipInfo:
    """No file's time: the same records make the same archive."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o600 << 16
    return entry
