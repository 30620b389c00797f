"""Fuzzes parsers of foreign bytes (tests/fuzz), each in a process of its own with bounded time and memory.

Prints a line a parser: cases, how many were refused, what of its code they reached, the slowest case (CPU time) and the
memory beyond what the process had after its seeds. An input that raises what it may not, takes too long or ends the
process is kept in build/fuzz/PARSER/failing; then the exit status is 1. Inputs that reached new code are kept in
build/fuzz/PARSER/corpus, and the next run begins with them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fuzz import harness  # noqa: E402 - of this tree
from tests.fuzz.__main__ import EXIT_FAILED, has_atheris  # noqa: E402

FOLDER = ROOT / "build" / "fuzz"
SILENT_S = 300.0
"""A process whose input takes so long by the clock is ended: it may be in code that no signal interrupts."""


@dataclass
class Result:
    """What became of a parser."""

    name: str
    report: dict[str, float | str]
    coverage: str
    failure: str

    def line(self) -> str:
        """For people."""
        report = self.report
        if not report:
            return f"{self.name:<18} no report"
        memory = (float(report["most_bytes"]) - float(report["start_bytes"])) / (1 << 20)
        refused = float(report["refused"]) / max(float(report["cases"]), 1)
        return (
            f"{self.name:<18} {report['cases']:>7,} {refused:>7.0%} {self.coverage:>8} "
            f"{float(report['worst_s']) * 1e3:>9,.0f} {memory:>8,.0f} {float(report['took_s']):>7,.0f}  "
            f"{self.failure.splitlines()[-1][:80] if self.failure else 'ok'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help="default: all")
    parser.add_argument("--cases", type=int, default=50_000, help="inputs of each (default 50,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--engine", choices=["atheris", "mutations"], default="atheris" if has_atheris() else "mutations"
    )
    parser.add_argument("--list", action="store_true", help="name the parsers, and end")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    names = harness.names()
    if unknown := set(options.parsers) - set(names):
        parser.error(f"no parser {min(unknown)}: there are {', '.join(names)}")
    if options.list:
        for name in names:
            print(f"{name:<18} {harness.load(name).about}")
        return 0
    print(f"{'parser':<18} {'cases':>7} {'refused':>7} {'reached':>8} {'worst ms':>9} {'+MiB':>8} {'seconds':>7}")
    results = []
    for name in options.parsers or names:
        results.append(_run(name, options))
        print(results[-1].line(), flush=True)
    failed = [result for result in results if result.failure]
    for result in failed:
        print(f"\n{result.name}: {FOLDER / result.name / 'failing'}\n{result.failure[-3000:]}", file=sys.stderr)
    if options.json:
        print(json.dumps({result.name: {**result.report, "failure": result.failure} for result in results}))
    return 1 if failed else 0


def _run(name: str, options: argparse.Namespace) -> Result:
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for kept in ("report.json", "failing", "failure"):
        (folder / kept).unlink(missing_ok=True)
    words = [sys.executable, "-m", "tests.fuzz", name, "--cases", str(options.cases), "--seed", str(options.seed)]
    words += ["--engine", options.engine, "--folder", str(folder)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        failure = _watch(process, folder)
    report: dict[str, float | str] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        report = json.loads((folder / "report.json").read_text())
    if process.returncode == EXIT_FAILED and (folder / "failure").exists():
        failure = (folder / "failure").read_text()
    elif process.returncode and not failure:
        failure = f"the process ended with {process.returncode}: {log.read_text(errors='replace')[-1500:]}"
        _keep(folder)
    elif not failure and report.get("cases", 0) < options.cases:
        failure = f"only {report.get('cases', 0)} cases were run: {log.read_text(errors='replace')[-1500:]}"
    reached = re.findall(r"cov: (\d+)", log.read_text(errors="replace"))
    return Result(name, report, reached[-1] if reached else "-", failure)


def _watch(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Waits for the end of a process; ends one that has run the same input for too long."""
    before, since = b"", 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
            return ""
        with contextlib.suppress(FileNotFoundError):
            now = (folder / "now").read_bytes()
            since = since + 5.0 if now == before else 0.0
            before = now
        if since > SILENT_S:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _keep(folder)
            return f"one input took more than {SILENT_S:.0f} s"


def _keep(folder: Path) -> None:
    """Keeps the input that a process died of."""
    with contextlib.suppress(FileNotFoundError):
        now = (folder / "now").read_bytes()
        (folder / "failing").write_bytes(now[8 : 8 + int.from_bytes(now[:8], "little")])


if __name__ == "__main__":
    sys.exit(main())
