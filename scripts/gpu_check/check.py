"""Runs the parts of gpu-check one by one, each in a process of its own with a time limit, and writes what they find.

``results.json`` and ``report.txt`` are written anew after each part, so that whatever comes later takes nothing away.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.gpu_check.common import Context, format_table, write_json  # noqa: E402 - the folder may not be installed
from scripts.gpu_check.parts import BESIDE, LIMIT_S, ORDER, REAL_ONLY  # noqa: E402


def run_part(options: argparse.Namespace) -> int:
    """One part, in this process."""
    module = importlib.import_module(f"scripts.gpu_check.parts.{options.part}")
    ctx = Context(
        options.out, options.scratch, options.python, options.fake, time.monotonic() + options.time_limit, options.part
    )
    ctx.save(what=(module.__doc__ or "").splitlines()[0])
    try:
        module.run(ctx)
    except Exception as failure:
        import traceback

        traceback.print_exc()
        ctx.check("the part went through", False, f"{type(failure).__name__}: {failure}"[:1500])
        return 1
    ctx.save(finished=True)
    return 0


class Running:
    """A part in a process of its own."""

    def __init__(self, name: str, options: argparse.Namespace, limit_s: float) -> None:
        self.name, self.began, self.limit_s = name, time.monotonic(), limit_s
        self.log = options.scratch / f"{name}.log"
        command = [sys.executable, "-m", "scripts.gpu_check.check", "--part", name, "--out", options.out]
        command += ["--scratch", options.scratch, "--python", options.python, "--time-limit", str(limit_s)]
        command += ["--fake"] if options.fake else []
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with open(self.log, "wb") as log:
            # A session of its own: what it starts is ended with it.
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
            )

    def finished(self) -> bool:
        return self.process.poll() is not None

    def overdue(self) -> bool:
        return time.monotonic() - self.began > self.limit_s

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self, scratch: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((scratch / f"part-{self.name}.json").read_text())
        took = time.monotonic() - self.began
        found["seconds"] = round(took, 1)
        if not found.pop("finished", False):
            cut = took >= self.limit_s
            reason = f"ended after its limit of {self.limit_s:.0f} s" if cut else f"exit {self.process.returncode}"
            found.setdefault("checks", []).append(
                {"what": "the part came to its end", "passed": False, "detail": reason}
            )
            found["log"] = self.log.read_text(errors="replace")[-4000:]
        return found


def run_parts(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    results: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "fake": options.fake, "command": sys.argv[1:], "parts": {},
    }  # fmt: skip

    def record(part: Running) -> None:
        results["parts"][part.name] = part.result(options.scratch)
        results["seconds"] = round(time.monotonic() - began, 1)
        write_json(options.out / "results.json", results)
        (options.out / "report.txt").write_text(report(results))
        checks = results["parts"][part.name].get("checks", [])
        failed = [c["what"] for c in checks if c["passed"] is False]
        text = f"{len(checks) - len(failed)} of {len(checks)} checks" + (
            f", FAILED: {'; '.join(failed)}" if failed else ""
        )
        print(f"{part.name:<10} {results['parts'][part.name]['seconds']:>6.1f} s  {text}", flush=True)

    waiting, running = list(names), []
    while waiting or running:
        left = options.time_limit - (time.monotonic() - began)
        alone = [part for part in running if part.name not in BESIDE]
        if waiting and not alone and (not running or (waiting[0] in BESIDE and len(running) < options.beside)):
            name = waiting.pop(0)
            if left < 8:
                results["parts"][name] = {"checks": [], "notes": ["not run: no time was left"]}
                continue
            running.append(Running(name, options, min(LIMIT_S[name], left - 3)))
            continue
        time.sleep(0.1)
        for part in list(running):
            if part.finished() or part.overdue():
                part.end()
                running.remove(part)
                record(part)
    write_json(options.out / "results.json", results)
    (options.out / "report.txt").write_text(report(results))
    return results


def report(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [
        f"gpu-check, {results['when']}, {results.get('seconds', 0)} s" + (", FAKE GPU" if results["fake"] else ""),
        "",
    ]
    checks = [
        [name, {True: "pass", False: "FAIL", None: "?"}[check["passed"]], check["what"], check.get("detail", "")]
        for name, part in results["parts"].items()
        for check in part.get("checks", [])
    ]
    lines += [*format_table(["part", "", "check", "detail"], [[c[0], c[1], c[2], c[3][:160]] for c in checks]), ""]
    for name, part in results["parts"].items():
        lines += ["", f"== {name}: {part.get('what', '')} ({part.get('seconds', 0)} s)", ""]
        for table in part.get("tables", []):
            lines += [table["title"], *("  " + line for line in format_table(table["head"], table["rows"])), ""]
        lines += [f"note: {note}" for note in part.get("notes", [])]
        if "log" in part:
            lines += ["its last words:", *("  | " + line for line in part["log"].splitlines()[-25:])]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description="Checks Argus on a machine with an NVIDIA GPU."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for the results (default: gpu-check)"
    )
    parser.add_argument("--only", metavar="PART,…", help=f"only these parts: {', '.join(ORDER)}")
    parser.add_argument("--time-limit", type=float, default=640, metavar="S", help="for all parts (default 640)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch (default: this one)")
    parser.add_argument("--beside", type=int, default=3, help="parts that measure no times run so many at once")
    parser.add_argument("--fake", action="store_true", help="use the fake GPU of tests/fakegpu")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.part:
        return run_part(options)
    names = list(ORDER) if not options.only else options.only.split(",")
    if unknown := [name for name in names if name not in ORDER]:
        parser.error(f"no such part: {', '.join(unknown)} (there are {', '.join(ORDER)})")
    if options.fake and not options.only:
        names = [name for name in names if name not in REAL_ONLY]
    names.sort(key=ORDER.index)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        results = run_parts(options, names)
    finally:
        with (options.out / "log.txt").open("w") as log:
            for file in sorted(options.scratch.glob("*.log")):
                log.write(f"===== {file.name}\n{file.read_text(errors='replace')[-20_000:]}\n")
        if options.keep:
            print(f"scratch: {options.scratch}")
        else:
            shutil.rmtree(options.scratch, ignore_errors=True)
    print(f"{options.out}/report.txt")
    failed = any(c["passed"] is False for part in results["parts"].values() for c in part.get("checks", []))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
