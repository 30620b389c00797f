"""What is run, how often, and in which order; as the command line or a YAML file gives it."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from argus.compare.observe import settings
from argus.compare.observe.settings import MOST_RUNS, UNITS
from argus.compare.observe.signs import MARGIN
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import named
from argus.system.redact import REDACTED, redacted

SCHEMA = "argus.observe.config/1"
LONGEST_JOB = 200
"""Characters of a job's name: it is a word of the commands that the report prints."""
PATTERNS = {
    "latency": r"latency[=: ]+([0-9.]+)\s*(ns|us|µs|ms|s)\b",
    "step": r"step[_ ]?time[=: ]+([0-9.]+)\s*(ns|us|µs|ms|s)\b",
    "ping": r"\btime=([0-9.]+) (ms)",
}
"""Patterns that have a name."""
_YAML_BYTES = 1 << 20
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Arm:
    """A way to run the command: with these variables of the environment."""

    name: str
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Readings:
    """What is read from a run's output, or from the page of a server's metrics.

    Attributes:
        pattern: A regular expression whose first group is a latency, and the second, if there is one, its unit.
        key: Of lines that are JSON objects, the key of a latency; dots lead into inner ones.
        unit: Where neither the pattern nor the end of the key (``_ms``) says it.
        errors, retries: Regular expressions of lines that report one; empty: not counted.
        metrics: The address of a page of metrics with a histogram of latencies, read before and after each run.
        metric: The histogram's name; empty: the only one.
    """

    pattern: str = ""
    key: str = ""
    unit: str = "s"
    errors: str = ""
    retries: str = ""
    metrics: str = ""
    metric: str = ""


@dataclass(frozen=True)
class Server:
    """A command that runs beside each run: started before it, ended after it.

    Attributes:
        command: Its words.
        ready: Text that it prints once it is ready; empty: it is as soon as it was started.
        ready_s: How long that may take.
    """

    command: tuple[str, ...]
    ready: str = ""
    ready_s: float = 30.0


@dataclass(frozen=True)
class Plan:
    """All of it. ``repeat`` and ``warmup`` are runs of each arm; ``timeout_s`` bounds a run, None: nothing does;
    ``trace`` names the jobs of runs that are traced, empty: they are not."""

    command: tuple[str, ...]
    repeat: int = 10
    warmup: int = 0
    arms: tuple[Arm, ...] = (Arm(""),)
    seed: int = 0
    timeout_s: float | None = None
    margin: float = MARGIN
    readings: Readings = Readings()
    server: Server | None = None
    trace: str = ""


@dataclass(frozen=True)
class Slot:
    """One run to be made. ``number`` counts from 1; ``block`` has one run of each arm; warm-up blocks are below 0."""

    number: int
    block: int
    arm: Arm

    @property
    def warmup(self) -> bool:
        """Whether it is left out of the statistics."""
        return self.block < 0


def schedule(plan: Plan) -> list[Slot]:
    """Runs in order: randomized blocks, so that what drifts meets all arms alike. A seed gives one order."""
    draw = random.Random(plan.seed)
    slots: list[Slot] = []
    for block in range(-plan.warmup, plan.repeat):
        arms = list(plan.arms)
        draw.shuffle(arms)
        slots += [Slot(len(slots) + 1 + at, block, arm) for at, arm in enumerate(arms)]
    return slots


def check(plan: Plan) -> Plan:
    """The plan, if it can be carried out.

    Raises:
        ArgusError: It cannot, with what to change.
    """
    if not plan.command or not plan.command[0]:
        raise _wrong("there is no command to run", "Write it behind --: argus observe --out DIR -- ./bench --size 4")
    for key, number in (
        ("repeat", plan.repeat), ("warmup", plan.warmup), ("seed", plan.seed), ("timeout", plan.timeout_s),
        ("margin", plan.margin), ("ready_timeout", plan.server.ready_s if plan.server else None),
    ):  # fmt: skip
        if number is not None:
            _read(key, str(number))
    if (plan.repeat + plan.warmup) * len(plan.arms) > MOST_RUNS:
        raise _wrong(f"more than {MOST_RUNS:,} runs", "Lower --repeat, or make a run longer")
    if plan.server and not (plan.server.command and plan.server.command[0]):
        raise _wrong("the server has no command", "Write it: --serve './server --port 80', or in a file server.command")
    names = [arm.name for arm in plan.arms]
    if len(set(names)) != len(names):
        raise _wrong(
            f"two arms are called '{next(name for name in names if names.count(name) > 1)}'", "Use different names"
        )
    if plan.arms != (Arm(""),) and "" in names:
        raise _wrong("an arm has no name", "Give each arm one")
    for arm in plan.arms:
        if not re.fullmatch(r"[\w.=+,:@ -]{0,80}", arm.name):
            raise _wrong(f"'{named(arm.name)}' cannot name an arm", "Use letters, digits and . = + - _")
        if redacted([arm.name]) != [arm.name]:
            raise _wrong("the name of an arm holds what looks like a secret", "Write NAME=VARIABLE=VALUE")
        for variable, value in arm.environment:
            if REDACTED in value:
                raise _wrong(
                    f"arm {arm.name} has {REDACTED} where a secret was left out", "Write it again, with the secret"
                )
            if not re.fullmatch(r"[A-Za-z_]\w*", variable) or "\0" in value:
                raise _wrong(f"'{named(variable)}' of arm {arm.name} cannot be a variable", "Write NAME=VARIABLE=VALUE")
    for words in (plan.command, plan.server.command if plan.server else ()):
        if any("\0" in word for word in words):
            raise _wrong("the command holds a zero byte", "Arguments of programs cannot contain one")
        if any(REDACTED in word for word in words):
            raise _wrong(f"the command has {REDACTED} where a secret was left out", "Write it again, with the secret")
    if (
        plan.trace != plan.trace.strip()
        or not plan.trace.isprintable()
        or len(plan.trace) > LONGEST_JOB
        or "@" in plan.trace
    ):
        raise _wrong("the job's name cannot be used", "Give --job another, without @")
    if plan.trace and "=" in plan.command[0] and any(arm.environment for arm in plan.arms):
        # `env`, which sets them for the command and not for Argus, would take it for a variable.
        raise _wrong("the command's path holds =, which cannot be traced with variables of arms",
                     "Call it by another path, or leave --trace out")  # fmt: skip
    _check_readings(plan.readings)
    return plan


def _check_readings(readings: Readings) -> None:
    if bool(readings.pattern) + bool(readings.key) + bool(readings.metrics) > 1:
        raise _wrong("latencies are read by a pattern, by a key or from metrics: only one can be used", "Leave one out")
    if readings.metrics and not re.fullmatch(r"https?://[!-.0-?A-~]{1,255}(/[!-~]{0,2000})?", readings.metrics):
        raise _wrong("the address of the metrics cannot be used", "Write http://127.0.0.1:8000/metrics")
    if readings.metric and not readings.metrics:
        raise _wrong("a metric is named, but no page of metrics", "Add --metrics URL")
    if readings.unit not in UNITS:
        raise _wrong(f"'{named(readings.unit)}' is not a unit", f"It is one of {', '.join(UNITS)}")
    for name, pattern in (("latency", readings.pattern), ("errors", readings.errors), ("retries", readings.retries)):
        try:
            compiled = re.compile(pattern)
        except re.error as failure:
            raise _wrong(
                f"the pattern of {name} is not a regular expression: {failure}", "Quote it for the shell"
            ) from None
        if name == "latency" and pattern and not compiled.groups:
            raise _wrong(
                "the pattern of latencies has no group", r"Put the number in brackets: latency=([0-9.]+)\s*(ms|us|s)"
            )


def parse_arm(text: str) -> Arm:
    """``NAME=VARIABLE=VALUE[,VARIABLE=VALUE]…``; an equals sign may be part of the name of an arm that sets nothing
    else: ``workers=8`` is the arm ``workers=8`` with that variable. Where the value looks like a secret, the arm has
    the variable's name alone.

    Raises:
        ArgusError: It is not of that form.
    """
    name, sign, rest = text.partition("=")
    pairs = [part.partition("=") for part in rest.split(",")]
    if sign and name and all(equals and variable for variable, equals, _ in pairs):
        return Arm(name, tuple((variable, value) for variable, _, value in pairs))
    if sign and name and len(pairs) == 1 and re.fullmatch(r"[A-Za-z_]\w*", name):
        return Arm(text if redacted([text]) == [text] else name, ((name, rest),))
    if not sign and name:
        return Arm(name)
    hint = "Write VARIABLE=VALUE or NAME=VARIABLE=VALUE, such as fast=OMP_NUM_THREADS=8"
    raise _wrong(f"'{named(text)}' is not an arm", hint)


def from_yaml(text: str, name: str) -> Plan:
    """A plan from a file's text; every value is read as it is written, so that ``off`` stays ``off``.

    Raises:
        ArgusError: It is not such a file.
    """
    import yaml

    if len(text) > _YAML_BYTES:
        raise _wrong(f"{name} is larger than 1 MiB", "A configuration has a few lines")
    try:
        document = yaml.load(text, Loader=_loader(yaml, name))
    except (yaml.YAMLError, RecursionError, ValueError) as failure:
        where = getattr(failure, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        raise _wrong(
            f"{name} is not YAML{line}: {getattr(failure, 'problem', None) or failure}", "See docs/observe.md"
        ) from None
    if not isinstance(document, dict):
        raise _wrong(f"{name} holds no settings", "Begin with command: and repeat:")
    return from_document(document, name)


def _loader(yaml: Any, name: str) -> Any:
    """Reads scalars as text, and refuses aliases, a few lines of which could make gigabytes, and keys that are there
    twice, of which the last would win."""

    class Loader(yaml.BaseLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.composer.ComposerError(None, None, "aliases are not read", event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, _ in getattr(node, "value", ()):
                line = key.start_mark.line + 1
                if isinstance(key.value, str) and lines.setdefault(key.value, line) != line:
                    where = f"in lines {lines[key.value]} and {line}"
                    raise _wrong(f"{name} has '{named(key.value)}' twice, {where}", "Leave one of them out")
            return super().construct_mapping(node, deep)

    return Loader


_KEYS = {
    "schema", "command", "repeat", "warmup", "arms", "seed", "timeout", "margin", "latency", "errors", "retries",
    "server", "trace",
}  # fmt: skip


def from_document(document: Mapping[str, Any], name: str) -> Plan:
    """A plan from what a YAML file holds: texts, lists and mappings of them.

    Raises:
        ArgusError: A key is unknown, or a value is not what it must be.
    """
    _known(document, _KEYS, name)
    if document.get("schema", SCHEMA) != SCHEMA:
        raise _wrong(f"{name} is of schema '{named(str(document['schema']))}'", f"This Argus reads {SCHEMA}")
    latency = _mapping(document.get("latency"), "latency", name)
    _known(latency, {"pattern", "key", "unit", "metrics", "metric"}, f"{name}: latency")
    pattern = _text(latency.get("pattern"), "latency.pattern", name)
    server = _mapping(document.get("server"), "server", name)
    _known(server, {"command", "ready", "ready_timeout"}, f"{name}: server")
    arms = tuple(
        Arm(
            str(arm),
            tuple(
                (str(key), _text(value, f"arms.{arm}", name))
                for key, value in _mapping(values, f"arms.{arm}", name).items()
            ),
        )
        for arm, values in _mapping(document.get("arms"), "arms", name).items()
    )
    return Plan(
        command=_words(document.get("command"), "command", name),
        repeat=_setting(document, "repeat", 10, name),
        warmup=_setting(document, "warmup", 0, name),
        arms=arms or (Arm(""),),
        seed=_setting(document, "seed", 0, name),
        timeout_s=_setting(document, "timeout", None, name),
        margin=_setting(document, "margin", MARGIN, name),
        readings=Readings(
            PATTERNS.get(pattern, pattern), _text(latency.get("key"), "latency.key", name),
            _text(latency.get("unit"), "latency.unit", name) or "s",
            _text(document.get("errors"), "errors", name), _text(document.get("retries"), "retries", name),
            _text(latency.get("metrics"), "latency.metrics", name),
            _text(latency.get("metric"), "latency.metric", name),
        ),
        server=Server(
            _words(server.get("command"), "server.command", name), _text(server.get("ready"), "server.ready", name),
            _setting(server, "ready_timeout", 30.0, f"{name}: server"),
        ) if server else None,
        trace=_text(document.get("trace"), "trace", name),
    )  # fmt: skip


def to_document(plan: Plan) -> dict[str, Any]:
    """What ``from_document`` reads, all values resolved; what looks like a secret is left out."""
    readings, server = plan.readings, plan.server
    return {
        "schema": SCHEMA,
        "command": redacted(plan.command),
        "repeat": plan.repeat,
        "warmup": plan.warmup,
        "arms": {
            arm.name: dict(
                redacted([f"{key}={value}"])[0].split("=", 1) for key, value in arm.environment
            )
            for arm in plan.arms
            if arm.name or len(plan.arms) > 1
        },
        "seed": plan.seed,
        "timeout": plan.timeout_s,
        "margin": plan.margin,
        "latency": {
            "pattern": readings.pattern or None, "key": readings.key or None, "unit": readings.unit,
            "metrics": redacted([readings.metrics])[0] or None, "metric": readings.metric or None,
        },
        "errors": readings.errors or None,
        "retries": readings.retries or None,
        "server": None
        if server is None
        else {"command": redacted(server.command), "ready": server.ready, "ready_timeout": server.ready_s},
        "trace": plan.trace or None,
    }  # fmt: skip


def to_yaml(document: Mapping[str, Any]) -> str:
    """A document as YAML that ``from_yaml`` reads."""
    import yaml

    return str(yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=120))


def _wrong(message: str, hint: str) -> ArgusError:
    return ArgusError(message, hint, EXIT_USAGE)


def _known(document: Mapping[str, Any], keys: set[str], name: str) -> None:
    for key in document:
        if key not in keys:
            raise _wrong(
                f"{name} has '{named(str(key))}', which means nothing here", f"There are {', '.join(sorted(keys))}"
            )


def _mapping(value: Any, key: str, name: str) -> Mapping[str, Any]:
    if _empty(value):
        return {}
    if not isinstance(value, dict):
        raise _wrong(f"{name}: {key} must have settings below it", "See docs/observe.md")
    return value


def _text(value: Any, key: str, name: str) -> str:
    if _empty(value):
        return ""
    if isinstance(value, (dict, list)):
        raise _wrong(f"{name}: {key} must be text", "See docs/observe.md")
    return str(value)


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in ("", "null", "~"))


def _words(value: Any, key: str, name: str) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return tuple(value)
    try:
        return tuple(shlex.split(_text(value, key, name)))
    except ValueError as failure:
        raise _wrong(f"{name}: {key} cannot be split into words: {failure}", "Write it as a list of words") from None


def _setting(document: Mapping[str, Any], key: str, default: _Value, name: str) -> _Value:
    """A value of a file, as the command line reads it, too; the default where it has none."""
    text = _text(document.get(key), key, name)
    return _read(key, text, f"{name}: ") if text else default


def _read(key: str, text: str, place: str = "") -> Any:
    try:
        return settings.read(key, text)
    except ValueError as failure:
        raise _wrong(f"{place}{key} is {failure}", "See docs/observe.md") from None


def command_words(text: str) -> Sequence[str]:
    """A command in one text, split as a shell does.

    Raises:
        ArgusError: A quote is open.
    """
    try:
        return shlex.split(text)
    except ValueError as failure:
        raise _wrong(f"'{text}' cannot be split into words: {failure}", "Close the quote") from None
