"""Runs one parser in a process of its own: ``python -m tests.fuzz PARSER --cases N …``, as scripts/fuzz starts it.

With atheris, inputs are chosen by what of the parser's code they reach; without, they are mutations of its seeds. What
was found is written as JSON after every few thousand cases and at the end, since atheris ends the process itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.fuzz import harness
from tests.fuzz.harness import MOST_BYTES, Bounded, Failed, Parser

EXIT_FAILED = 77
REPORT_EVERY = 2000


class Run:
    """A run of one parser.

    Args:
        parser: The parser.
        options: Of the command line.
        engine: "atheris" or "mutations".
    """

    def __init__(self, parser: Parser, options: argparse.Namespace, engine: str) -> None:
        self._options, self._engine = options, engine
        # Where scripts/fuzz finds the input, should this process die of it.
        self._now = _shared(options.folder / "now")
        self._began = time.monotonic()
        self.bounded: Bounded | None = None
        try:
            self.bounded = Bounded(parser, limit_memory=True)
        except Failed as failure:
            self._end({"failure": str(failure)}, failing=b"")
        assert self.bounded is not None
        self.bounded.tally.cases = self.bounded.tally.refused = 0

    def one(self, data: bytes) -> None:
        """Runs a case; ends the process after the last one, and after one that failed."""
        assert self.bounded is not None
        data = data[:MOST_BYTES]
        self._now[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
        tally = self.bounded.tally
        try:
            self.bounded.case(data)
        except Failed:
            self._report()
            self._end({"failure": tally.failure}, tally.failing)
        if tally.cases % REPORT_EVERY == 0 or tally.cases >= self._options.cases:
            self._report()
        if tally.cases >= self._options.cases:
            sys.stdout.flush()
            os._exit(0)

    def _report(self, **more: Any) -> None:
        assert self.bounded is not None
        tally = self.bounded.tally
        tally.look_at_memory()
        found = {
            "engine": self._engine, "cases": tally.cases, "refused": tally.refused, "worst_s": tally.worst_s,
            "start_bytes": tally.start_bytes, "most_bytes": tally.most_bytes, "took_s": time.monotonic() - self._began,
            **more,
        }  # fmt: skip
        (self._options.folder / "report.json").write_text(json.dumps(found))
        (self._options.folder / "slowest").write_bytes(tally.worst)

    def _end(self, found: dict[str, Any], failing: bytes) -> None:
        (self._options.folder / "failing").write_bytes(failing)
        failure = found["failure"].encode(errors="backslashreplace")  # it quotes the case
        (self._options.folder / "failure").write_bytes(failure)
        print(failure.decode(), file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)


def _shared(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        file.truncate(8 + MOST_BYTES)
        return mmap.mmap(file.fileno(), 8 + MOST_BYTES)


def _mutate(options: argparse.Namespace) -> None:
    parser = harness.load(options.parser)
    run = Run(parser, options, "mutations")
    for data in harness.mutations(parser, options.seed):
        run.one(data)


def _atheris(options: argparse.Namespace) -> None:
    atheris: Any = importlib.import_module("atheris")
    guided = _guided(options.parser)
    with atheris.instrument_imports(include=guided):
        for name in guided:
            importlib.import_module(name)
    parser = harness.load(options.parser)
    corpus = options.folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(parser.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = [sys.argv[0], f"-seed={options.seed}", f"-max_len={MOST_BYTES}", "-print_final_stats=0", "-verbosity=1",
             "-rss_limit_mb=0", "-timeout=86400", f"-artifact_prefix={options.folder}/", "-len_control=0"]  # fmt: skip
    if parser.tokens:
        listed = options.folder / "tokens"
        listed.write_text("".join(f'"{"".join(f"{chr(92)}x{byte:02x}" for byte in token[:64])}"\n'
                                  for token in parser.tokens))  # fmt: skip
        words.append(f"-dict={listed}")
    run = Run(parser, options, "atheris")
    atheris.Setup([*words, str(corpus)], run.one)
    atheris.Fuzz()


def _guided(name: str) -> list[str]:
    """The modules of the code under test, without importing them: atheris instruments them as they are imported."""
    spec = importlib.util.find_spec(f"tests.fuzz.parsers.{name}")
    assert spec is not None
    assert spec.origin is not None
    scope: dict[str, Any] = {}
    import ast

    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CODE":
            scope["CODE"] = ast.literal_eval(node.value)
    return list(scope["CODE"])


def _replay(options: argparse.Namespace) -> None:
    parser = harness.load(options.parser)
    harness.Bounded(parser, limit_memory=True).case(options.input.read_bytes())


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("parser", choices=harness.names())
    options.add_argument("--cases", type=int, default=1000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--engine", choices=["atheris", "mutations"], default="mutations")
    options.add_argument("--folder", type=Path, help="where the report, the corpus and a failing input go")
    options.add_argument("--input", type=Path, help="run this input only")
    chosen = options.parse_args()
    if chosen.input is not None:
        _replay(chosen)
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (chosen.folder / "report.json").unlink()
    (_atheris if chosen.engine == "atheris" else _mutate)(chosen)


def has_atheris() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("atheris") is not None


if __name__ == "__main__":
    main()
