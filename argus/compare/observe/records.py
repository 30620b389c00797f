"""The files of an observation: metrics.json, run_meta.json, resolved_config.yaml, report.md, and each run's output.

A file is replaced at once, so that a kill at any moment leaves the last whole one. The contracts are ``*.schema.json``
beside this file.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argus.compare.observe.contract import wrong_in
from argus.compare.observe.plan import Plan, from_yaml, to_document, to_yaml
from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import named
from argus.system import files

METRICS, META, CONFIG, REPORT = "metrics.json", "run_meta.json", "resolved_config.yaml", "report.md"
OUTPUT = "output"
METRICS_SCHEMA, META_SCHEMA = "argus.observe.metrics/1", "argus.observe.meta/1"
UNCHANGED = "Nothing was changed"
MOST_IN_HISTOGRAM = 2_000_000
"""Twice as many latencies as are kept of a run (``latency.MOST_SAMPLES``): each bucket of a page keeps one at least."""
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Stored:
    """What a folder holds: the three documents as they were written, and the plan."""

    metrics: dict[str, Any]
    meta: dict[str, Any]
    config: dict[str, Any]
    plan: Plan


@contextmanager
def writing(folder: Path, hint: str = "") -> Iterator[None]:
    """Turns what can go wrong with the folder's files into one line.

    Args:
        folder: The folder.
        hint: What to do where it has room; empty: what was recorded can be reported.

    Raises:
        ArgusError: A file cannot be written; what was written before is there.
    """
    try:
        yield
    except files.Untrusted as failure:
        raise ArgusError(f"{folder} is not used: {failure.strerror}", failure.fix, EXIT_UNAVAILABLE) from None
    except OSError as failure:
        hint = hint or f"Runs that were recorded are there: argus observe report {folder}"
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"Free some space there, then: argus observe report {folder}. What was recorded is unchanged"
        raise ArgusError(f"{folder} cannot be written: {failure.strerror}", hint, EXIT_FAILURE) from None


class Records:
    """A new folder for an observation.

    Args:
        folder: Where; it is made, or it is empty.

    Raises:
        ArgusError: It holds something, or cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._fd = files.open_folder(folder, create=True)
        except files.Untrusted as failure:
            raise ArgusError(f"{folder} is not used: {failure.strerror}", failure.fix, EXIT_UNAVAILABLE) from None
        except FileExistsError:
            raise ArgusError(f"{folder} is not a folder", "Give --out one that is new", EXIT_USAGE) from None
        except OSError as failure:
            raise ArgusError(
                f"{folder} cannot be made: {failure.strerror}", "Give --out another", EXIT_FAILURE
            ) from None
        if there := os.listdir(self._fd):
            self.close()
            raise (
                _taken(folder)
                if META in there or set(there) <= {OUTPUT, CONFIG}
                else ArgusError(
                    f"{folder} is not empty", "Give --out a new one: no record is ever replaced", EXIT_USAGE
                )
            )

    def close(self) -> None:
        """Closes the folder."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def begin(self, plan: Plan, meta: Mapping[str, Any]) -> None:
        """Writes what is known before the first run."""
        with writing(self.folder):
            try:
                os.mkdir(OUTPUT, mode=0o700, dir_fd=self._fd)
            except FileExistsError:
                raise _taken(self.folder) from None
            self._write(CONFIG, to_yaml(to_document(plan)))
            self.write_meta(meta)

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        """Replaces run_meta.json."""
        self._write(META, to_json({"schema": META_SCHEMA, **meta}))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Replaces metrics.json."""
        self._write(METRICS, to_json({"schema": METRICS_SCHEMA, **metrics}))

    def write_report(self, text: str) -> None:
        """Replaces report.md."""
        self._write(REPORT, text)

    def _write(self, name: str, text: str) -> None:
        with writing(self.folder):
            files.write_at(self._fd, name, text.encode(errors="backslashreplace"))

    @contextmanager
    def output(self, name: str) -> Iterator[int]:
        """A descriptor of a new file for output of a command, ``output/NAME``."""
        with writing(self.folder):
            folder = os.open(OUTPUT, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                fd = files.open_at(folder, name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            finally:
                os.close(folder)
        try:
            yield fd
        finally:
            os.close(fd)


def _taken(folder: Path) -> ArgusError:
    """The error for a folder of another observe, one that runs or one that ended."""
    hint = f"Give --out a new one: no record is ever replaced. argus observe report {folder} shows what is there"
    return ArgusError(f"{folder} is the folder of another argus observe", hint, EXIT_USAGE)


def lines_of(fd: int, longest: int) -> Iterator[str]:
    """The lines of a file from its start, each at most ``longest`` bytes; longer ones in pieces."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        while line := file.readline(longest):
            yield line.decode(errors="replace")


def to_json(document: Mapping[str, Any]) -> str:
    """A document as its file has it."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(folder: Path) -> Stored:
    """What a folder holds.

    Raises:
        ArgusError: It is not the folder of an observation, or it is damaged.
    """
    try:
        with files.opened(folder) as fd:
            texts = {name: files.read_at(fd, name, _MOST_BYTES).decode() for name in (METRICS, META, CONFIG)}
    except files.Untrusted as failure:
        raise ArgusError(f"{folder} is not read: {failure.strerror}", failure.fix, EXIT_UNAVAILABLE) from None
    except FileNotFoundError as failure:
        missing = failure.filename if failure.filename in (METRICS, META, CONFIG) else ""
        what = f"{folder} has no {missing}" if missing else f"there is no {folder}"
        hint = "Give the folder that --out named; before the first run has ended there is nothing to report"
        raise ArgusError(what, hint, EXIT_UNAVAILABLE) from None
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8"
        raise ArgusError(f"{folder} cannot be read: {reason}", "", EXIT_FAILURE) from None
    contracts = schemas()
    metrics = _document(folder / METRICS, texts[METRICS], contracts[METRICS], METRICS_SCHEMA)
    meta = _document(folder / META, texts[META], contracts[META], META_SCHEMA)
    try:
        plan = from_yaml(texts[CONFIG], str(folder / CONFIG))
    except ArgusError as wrong:
        raise ArgusError(wrong.message, UNCHANGED, EXIT_FAILURE) from None
    if wrong_run := next(_disagreements(metrics["runs"], [arm.name for arm in plan.arms]), ""):
        raise _damaged(folder / METRICS, wrong_run)
    return Stored(metrics, meta, to_document(plan), plan)


def _disagreements(runs: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> Iterator[str]:
    """What no schema can say of runs, and what the figures of a decision are computed from."""
    for place, run in enumerate(runs):
        name = f"runs[{place}]"
        if run["number"] != place + 1:
            yield f"{name}.number is {run['number']:,}, not {place + 1:,}"
        if run["arm"] not in arms:
            yield f"{name}.arm is '{named(run['arm'])}', of which {CONFIG} knows nothing"
        if run["status"] == "ok" and not run["figures"].get("wall_ns"):
            yield f"{name} succeeded, and has no figures.wall_ns above 0"
        latency = run["latency"]
        if latency is not None and latency["count"]:
            for quantile in ("p50_ns", "p95_ns", "p99_ns"):
                if not latency[quantile]:
                    yield f"{name}.latency has a count, and no {quantile} above 0"
            if sum(count for _, count in latency["histogram"]) > MOST_IN_HISTOGRAM:
                yield f"{name}.latency.histogram has more than {MOST_IN_HISTOGRAM:,} latencies"


def _document(path: Path, text: str, contract: Mapping[str, Any], schema: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
        found = document.get("schema")
    except (ValueError, RecursionError, AttributeError):
        raise _damaged(path, "it is not a JSON object") from None
    if found != schema:
        hint = f"This Argus reads {schema}: use the version that wrote it"
        raise ArgusError(f"{path} is of schema '{named(str(found))}'", hint, EXIT_UNAVAILABLE)
    if wrong := wrong_in(document, contract):
        raise _damaged(path, wrong)
    return dict(document)


def _damaged(path: Path, what: str) -> ArgusError:
    return ArgusError(f"{path} is damaged: {what}", UNCHANGED, EXIT_FAILURE)


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON schemas of the documents, by file name."""
    place = Path(__file__).parent
    names = {METRICS: "metrics.schema.json", META: "run_meta.schema.json", CONFIG: "resolved_config.schema.json"}
    return {name: json.loads((place / file).read_text(encoding="utf-8")) for name, file in names.items()}
