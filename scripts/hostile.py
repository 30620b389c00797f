"""Two honest jobs, traced alone, then beside hostile processes of another user (tests/security/hostile_everything.py).

The hostile ones have 20,000 mapped files, names that grow without bound, forged lists of threads, links and pipes that
change places, a flood of calls, CUPTI memory that changes while it is read, files that are cut short while they are
read, and repositories above the honest jobs. Compared are the honest jobs' verdicts, what was counted of each step,
what they run with, and what was lost; then the memory of Argus's processes, and whether any file of root's has changed,
or is in the store. The exit status is 1 if something differs, or if nothing was lost of the hostile ones.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "fakegpu"))
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from benches._processes import PARTS, Peaks  # noqa: E402
from run import BUILD, Job, armed  # noqa: E402 - the folder is not a package

from argus.capture.python.layouts import LAYOUTS  # noqa: E402

ARGUS = [sys.executable, "-m", "argus.cli.main"]
NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
KINDS = ("files", "lists", "links", "flood", "names", "memory", "truncation", "parents")
SECRET = "7" * 40
"""What is in a file of root's."""
HONEST = {"slow": {"FAKEGPU_SLOW_RANK": "1", "FAKEGPU_SLOW_FACTOR": "2.0"}, "well": {}}
"""Two jobs: one rank of the first computes twice as long."""
RANKS = 2
STEP_ARGS = ["--steps", "0", "--forward-us", "60000", "--backward-us", "90000", "--layers", "2", "--data-ms", "10"]
"""Steps of a quarter of a second: the jobs themselves take little of a CPU."""
MOST_BYTES = 500_000_000
"""Of all of Argus's processes together, without pages of files."""
OF_ALL = frozenset(("loop_stalls", "cupti_bytes_unknown"))
"""Printed, not compared: Argus's own, which every job's coverage has; and kernels under way at the trace's end, which
the fake GPU does not give back, alone in every other run, too."""
UNTOUCHED = tuple(map(Path, ("/etc", "/etc/cron.d", "/var/lib", "/var/cache", "/usr/local")))
"""Folders that hostile processes must not have Argus write to."""
ALLOWED_SHARE = 0.02
"""How much less of the steps may be found beside hostile processes."""


@dataclass
class Honest:
    """What Argus reports of an honest job.

    Attributes:
        verdict: Status, and kind and ranks of the first finding.
        launches: Of a step, of each rank: the most frequent number.
        found: Steps stored by steps that were done.
        losses: Loss counters above 0.
        seen: Signals that were not observed throughout, and the share.
        facts: Commits of their programs, and what of their environment could not be read.
    """

    verdict: str
    launches: list[int]
    found: float
    losses: dict[str, int]
    seen: dict[str, float]
    facts: list[dict[str, str]]


@dataclass
class Run:
    """A trace: its honest jobs, and the memory of all of Argus's processes."""

    honest: dict[str, Honest]
    peaks: Peaks
    lines: list[str] = field(default_factory=list)
    hostile_losses: dict[str, int] = field(default_factory=dict)
    leaked: int = 0
    """Rows with what is in a file of root's."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long both are traced together (default 5)")
    parser.add_argument("--alone", type=float, default=1.0, help="minutes of the trace without them (default 1)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("hostile: needs root: sudo scripts/hostile", file=sys.stderr)
        return 3
    folder = Path(tempfile.mkdtemp(prefix="argus-hostile-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        treasure = _treasure(folder)
        alone = trace(folder / "alone", options.alone * 60, [], treasure)
        before = _snapshot(treasure)  # Argus's own folders exist now
        beside = trace(folder / "beside", options.minutes * 60, options.kinds.split(","), treasure)
        wrong = compare(alone, beside)
        if (after := _snapshot(treasure)) != before:
            wrong.append(f"files of root's changed: {sorted(set(before) ^ set(after))[:5] or 'in place'}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(alone, beside, wrong)
    if options.json:
        both = {"alone": alone, "beside": beside}
        found = {
            name: {
                "peak_bytes": run.peaks.own,
                "peak_bytes_with_files": run.peaks.whole,
                "peaks": {part: run.peaks.parts[part] for part in PARTS},
                "peaks_of_each": {part: run.peaks.each[part] for part in PARTS},
                "hostile_losses": run.hostile_losses,
                "honest": {job: vars(found) for job, found in run.honest.items()},
            }
            for name, run in both.items()
        }
        print(json.dumps(found | {"wrong": wrong}))
    return 1 if wrong else 0


def trace(folder: Path, seconds: float, kinds: Sequence[str], treasure: Path) -> Run:
    """One trace of the honest jobs, and of these hostile processes."""
    folder.mkdir()
    shared, works = folder / "shared", folder / "shared" / "job"
    works.mkdir(parents=True)
    shared.chmod(0o1777)
    store = f"chdb://{folder}/store"
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name, env in HONEST.items():
            log = str(folder / f"{name}-{{rank}}")
            arguments = [*STEP_ARGS, "--log", log]
            os.chdir(works)
            try:
                job = Job(ranks=RANKS, args=arguments, env={**env, "JOB_NAME": name}, cupti=True)
                jobs[name] = stack.enter_context(job)
            finally:
                os.chdir(ROOT)
        hostile = stack.enter_context(_hostile(folder, kinds, treasure))
        pids = [pid for job in jobs.values() for pid in job.pids] + [process.pid for process in hostile]
        time.sleep(2.0)
        words = ["trace", "--pid", ",".join(map(str, pids)), "--duration", f"{seconds:.0f}s", "--plain"]
        tracing = subprocess.Popen(
            [*ARGUS, *words, "--store", store], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={**os.environ, "ARGUS_SPILL_DIR": str(folder / "spill")},
        )  # fmt: skip
        stack.callback(tracing.kill)
        lines, peaks = _watch(tracing, folder / "store")
        if tracing.wait(60) != 0:
            raise SystemExit("hostile: the trace failed:\n" + "".join(lines[-20:]))
        if ended := [kind for kind, process in zip(kinds, hostile, strict=True) if process.poll() is not None]:
            raise SystemExit(f"hostile: did not last as long as the trace: {', '.join(ended)}")
        steps = {name: _steps(folder, name) for name in HONEST}
    honest = {name: _of_honest(store, name, steps[name]) for name in HONEST}
    secret = _rows(store, f"SELECT count() AS n FROM environments WHERE toString(facts) LIKE '%{SECRET}%'")
    return Run(honest, peaks, lines, _losses(store, tuple(HONEST)), int(secret[0]["n"]))


def _watch(tracing: subprocess.Popen[str], store: Path) -> tuple[list[str], Peaks]:
    """What a trace prints, and the most memory that it, its reader, its engine and what else it starts had."""
    assert tracing.stdout is not None
    os.set_blocking(tracing.stdout.fileno(), False)
    text, peaks = "", Peaks()
    while tracing.poll() is None:
        peaks.look(tracing.pid, store)
        with contextlib.suppress(TypeError, BlockingIOError):
            text += tracing.stdout.read() or ""
        time.sleep(0.25)
    with contextlib.suppress(TypeError, BlockingIOError):
        text += tracing.stdout.read() or ""
    return text.splitlines(keepends=True), peaks


@contextlib.contextmanager
def _hostile(folder: Path, kinds: Sequence[str], treasure: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The hostile processes, of nobody's, with the lowest claim to a CPU: what is tried is Argus, not the scheduler."""
    program = folder / "hostile.py"
    shutil.copy(ROOT / "tests" / "security" / "hostile_everything.py", program)
    libraries = folder / "libraries"
    shutil.copytree(BUILD, libraries, ignore=lambda place, names: [n for n in names if ".so" not in n])
    for path in (libraries, *libraries.rglob("*")):
        path.chmod(0o755)
    interpreter = os.path.realpath("/usr/bin/python3")
    version = subprocess.run(
        [interpreter, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    layout = LAYOUTS[tuple(map(int, version.stdout.split()))]  # type: ignore[index]
    offsets = (layout.interp_head, layout.threads_head, layout.thread_next, layout.thread_frame)
    environment = {
        "PATH": os.environ["PATH"], "TREASURE": str(treasure), "OFFSETS": ",".join(map(str, offsets)), "RANK": "0",
        "SHARED": str(folder / "shared"),
        "WORLD_SIZE": str(RANKS), "JOB_NAME": next(iter(HONEST)), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    started: list[subprocess.Popen[str]] = []
    try:
        for kind in kinds:
            own = folder / kind
            own.mkdir()
            os.chown(own, NOBODY, NOBODY)
            more = armed() if kind == "memory" else {}
            words = ["nice", "-n", "19", *AS_NOBODY, interpreter, "-I", str(program), kind, str(own), str(libraries)]
            started.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**environment, **more}, cwd=own,
                                 start_new_session=True)
            )  # fmt: skip
        for kind, process in zip(kinds, started, strict=True):
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"hostile: {kind} did not start")
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            Path(f"/tmp/perf-{process.pid}.map").unlink(missing_ok=True)


def _steps(folder: Path, job: str) -> list[list[int]]:
    """When each step of each rank ended, CLOCK_MONOTONIC, as the job itself has logged it."""
    found = []
    for rank in range(RANKS):
        rows = [json.loads(line) for line in (folder / f"{job}-{rank}").read_text().splitlines() if line.endswith("}")]
        found.append([int(row["end_ns"]) for row in rows if "end_ns" in row])
    return found


def _rows(store: str, sql: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*ARGUS, "sql", "--store", store, "--format", "json", "--max-rows", "0", sql], capture_output=True, text=True,
        cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"hostile: {done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def _of_honest(store: str, job: str, steps: list[list[int]]) -> Honest:
    done = subprocess.run(
        [*ARGUS, "diagnose", "--store", store, "--job", job, "--format", "json", "--no-store"], capture_output=True,
        text=True, cwd=ROOT,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise SystemExit(f"hostile: {done.stderr}")
    verdict_json = json.loads(done.stdout)
    first = verdict_json["findings"][0] if verdict_json["findings"] else {}
    verdict = f"{verdict_json['status']} {first.get('kind', '')} {first.get('ranks', '')}".strip()
    launches, found, expected = [], 0, 0
    offset = int(_rows(store, f"SELECT any(mono_offset_ns) AS n FROM jobs WHERE job = '{job}'")[0]["n"])
    for rank in range(RANKS):
        rows = _rows(store, "SELECT launches, toUnixTimestamp64Nano(ts) AS ts FROM iterations "
                            f"WHERE job = '{job}' AND rank = {rank} ORDER BY step")  # fmt: skip
        # The first and last ones may be cut.
        inner = [int(row["launches"]) for row in rows[1:-1]]
        launches.append(max(set(inner), key=inner.count) if inner else 0)
        if rows:
            begin, end = int(rows[0]["ts"]) - offset, int(rows[-1]["ts"]) - offset
            expected += sum(begin < at <= end for at in steps[rank])
            found += len(rows) - 1
    seen = _rows(
        store, "SELECT signal, min(seen) AS least FROM signal_coverage FINAL "
        f"WHERE job = '{job}' AND reason NOT LIKE 'the trace%' GROUP BY signal HAVING least < 1"
    )  # fmt: skip
    return Honest(
        verdict, launches, found / max(expected, 1), _losses(store, (job,), leave_out=False),
        {str(row["signal"]): round(float(row["least"]), 2) for row in seen},
        _rows(store, "SELECT DISTINCT facts['git.commit'] AS commit, facts['unreadable'] AS unreadable "
                     f"FROM environments FINAL WHERE job = '{job}' ORDER BY ALL"),
    )  # fmt: skip


def _losses(store: str, jobs: tuple[str, ...], *, leave_out: bool = True) -> dict[str, int]:
    """Loss counters above 0 of these jobs, or of all others."""
    listed = ", ".join(f"'{job}'" for job in jobs)
    found = _rows(
        store, "SELECT counter, max(value) AS n FROM coverage FINAL WHERE loss AND value > 0 AND job "
        f"{'NOT ' if leave_out else ''}IN ({listed}) GROUP BY counter ORDER BY counter"
    )  # fmt: skip
    return {str(row["counter"]): int(row["n"]) for row in found}


def compare(alone: Run, beside: Run) -> list[str]:
    """What is not with the hostile processes as it is without them."""
    wrong = []
    for name, before in alone.honest.items():
        after = beside.honest[name]
        if after.verdict != before.verdict:
            wrong.append(f"{name}: verdict {after.verdict!r}, alone {before.verdict!r}")
        if after.launches != before.launches:
            wrong.append(f"{name}: {after.launches} launches a step, alone {before.launches}")
        if after.found < before.found - ALLOWED_SHARE:
            wrong.append(f"{name}: {after.found:.1%} of the steps, alone {before.found:.1%}")
        if after.facts != before.facts:
            wrong.append(f"{name}: {after.facts} of what it runs with, alone {before.facts}")
        if new := after.losses.keys() - before.losses.keys() - OF_ALL:
            wrong.append(f"{name}: lost, and not alone: {', '.join(f'{n} {after.losses[n]}' for n in sorted(new))}")
        if less := {s: share for s, share in after.seen.items() if share < before.seen.get(s, 1) - ALLOWED_SHARE}:
            wrong.append(f"{name}: observed for a part of the time, and not alone: {less}")
    if not beside.hostile_losses:
        wrong.append("nothing was lost of the hostile processes: what they do has no effect")
    if beside.leaked:
        wrong.append(f"{beside.leaked} rows with what is in a file of root's")
    if beside.peaks.own > MOST_BYTES:
        wrong.append(f"Argus took {beside.peaks}")
    printed = "".join(beside.lines)
    if "internal error" in printed or re.search(r"[^\n -~\u00a0-\uffff]", printed):
        wrong.append("the trace printed an internal error, or what is no text")
    return wrong


def show(alone: Run, beside: Run, wrong: list[str]) -> None:
    for title, run in (("alone", alone), ("beside hostile processes", beside)):
        print(f"{title}: Argus's memory at most {run.peaks}")
        for name, found in run.honest.items():
            print(f"  {name}: {found.verdict}; {found.launches} launches a step, {found.found:.1%} of the steps; "
                  f"lost {found.losses or 'nothing'}; in part {found.seen or 'nothing'}")  # fmt: skip
        if run.hostile_losses:
            print(f"  the hostile ones' own losses: {run.hostile_losses}")
    print("the same" if not wrong else "DIFFERENT:\n  " + "\n  ".join(wrong))


def _treasure(folder: Path) -> Path:
    """A file of root's that nobody may change."""
    place = folder / "roots"
    place.mkdir(mode=0o700)
    treasure = place / "treasure"
    treasure.write_text(SECRET)
    treasure.chmod(0o600)
    return treasure


def _snapshot(treasure: Path) -> list[tuple[str, int, int, int]]:
    """Size, mode and time of change of what nobody but root may change: the treasure, /etc, /var/lib, /var/cache,
    /usr/local; and the bytes of the treasure and of the C library, which all processes map."""
    found = []
    for path in [treasure, *(path for place in UNTOUCHED for path in _below(place))]:
        with contextlib.suppress(OSError):
            status = path.lstat()
            found.append((str(path), status.st_size, status.st_mode, status.st_ctime_ns))
    for path in (treasure, _c_library()):
        found.append((f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}", 0, 0, 0))
    return found


def _below(place: Path) -> Iterator[Path]:
    """A folder and what lies in it, two folders deep, without what Argus keeps there itself."""
    for depth in ("", "*", "*/*"):
        yield from (path for path in sorted(place.glob(depth) if depth else [place]) if "argus" not in path.parts)


def _c_library() -> Path:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in lines if re.search(r"/libc[.-][^/]*$", line))


if __name__ == "__main__":
    sys.exit(main())
