"""Every BPF program of Argus, compiled by other versions of clang and bcc than this machine's, and loaded into this
machine's kernel: what one clang compiles, and this kernel's verifier takes, another may compile to what it refuses.

A compiler is named by the suite of Debian that it is of: bookworm has clang 14, trixie clang 19, sid the newest. It is
unpacked into build/compilers and runs there (chroot); nothing is installed. Each is fetched once: 70 to 90 MB, 300 MB
unpacked, 10 s. After that a compiler takes some 20 s.

  scripts/compilers                     the three of them, and a table
  scripts/compilers sid                 one
  scripts/compilers --fetch sid         only fetch it (scripts/setup, with ARGUS_WITH_NEWEST_BCC=sid)

Needs root, apt and x86-64. tests/kernel/test_compilers.py does this for those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import debian

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "compilers"
SUITES = ("bookworm", "trixie", "sid")
SOURCES = "argus-src"
"""Folder in a compiler's root, for the part of Argus that compiles."""
MODULES = (
    "__init__",
    *(f"model/{name}" for name in ("__init__", "errors", "units")),
    *(f"system/{name}" for name in ("__init__", "child", "disk_cache", "files", "resources", "secrets", "syscalls")),
    "capture/__init__",
    *(f"capture/kernel/{name}" for name in ("__init__", "bcc", "compile")),
)
TIME_LIMIT_S = 300


class Compiler:
    """Clang and bcc of a suite of Debian.

    Args:
        suite: As "sid".

    Attributes:
        root: Where its packages are unpacked.
    """

    def __init__(self, suite: str) -> None:
        self.suite = suite
        self.root = BUILD / suite

    @property
    def is_there(self) -> bool:
        """Whether it was fetched, by which only whole ones are in place."""
        return (self.root / ".packages").is_file()

    def fetch(self, site: str = "", keyring: str = debian.KEYRING) -> None:
        """Downloads and unpacks it, if it is not there.

        Args:
            site: Of a mirror; empty: the one that apt uses.
            keyring: Whose keys the suite's index must be signed with.

        Raises:
            Failure: There is no such suite, or it cannot be fetched.
        """
        if self.is_there:
            return
        packages = debian.Suite(BUILD / f".apt-{self.suite}", self.suite, site or debian.mirror(), keyring)
        part = BUILD / f".part-{self.suite}"
        try:
            packages.run("apt-get", "update")
            archives = packages.fetch_whole(["python3-bpfcc"])
            shutil.rmtree(part, ignore_errors=True)
            debian.unpack(archives, part)
            (part / ".packages").write_text("\n".join(archive.name for archive in archives) + "\n")
            part.rename(self.root)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(packages.folder, ignore_errors=True)

    @property
    def name(self) -> str:
        """Its versions: "clang 19, bcc 0.31.0"."""
        packages = (self.root / ".packages").read_text().splitlines()
        clang = [found[1] for line in packages if (found := re.match(r"libclang-cpp(\d+)_", line))]
        bcc = [found[1] for line in packages if (found := re.match(r"libbpfcc_([\d.]+)", line))]
        return f"clang {clang[0] if clang else '?'}, bcc {bcc[0] if bcc else '?'}"

    def compile(self, text: str, flags: list[str]) -> dict[str, Any]:
        """What ``argus.capture.kernel.compile`` answers where this is the machine's compiler: takes the place of
        ``compile._ask_child``.

        Raises:
            CompileError: The sources do not compile.
        """
        from argus.capture.kernel.compile import CompileError

        self._copy_sources()
        request = json.dumps({"text": text, "flags": [f"-I/{SOURCES}/bpf", *flags]})
        done = subprocess.run(
            ["/usr/bin/python3", "-m", "argus.capture.kernel.compile"], input=request.encode(), capture_output=True,
            env={"PYTHONPATH": f"/{SOURCES}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin", "HOME": "/"},
            timeout=TIME_LIMIT_S, check=False, preexec_fn=self._enter,
        )  # fmt: skip
        if done.returncode:
            raise CompileError(
                done.stderr.decode(errors="replace").strip() or f"error: it ended with {done.returncode}"
            )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def _enter(self) -> None:
        os.chroot(self.root)
        os.chdir("/")

    def _copy_sources(self) -> None:
        sources = self.root / SOURCES
        for module in MODULES:
            copy = sources / "argus" / f"{module}.py"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "argus" / f"{module}.py", copy)
        shutil.copytree(ROOT / "bpf", sources / "bpf", dirs_exist_ok=True)


def check(suite: str) -> list[dict[str, Any]]:
    """Compiles all programs with a compiler, loads them and lets them work, in this process.

    Returns:
        Rows as of scripts/bpf_programs.py: "step", and what came of it.
    """
    import bpf_programs

    from argus.capture.kernel import compile

    rows: list[dict[str, Any]] = []

    def report(step: str, **fields: Any) -> None:
        rows.append({"step": step, **fields})

    os.environ["ARGUS_CACHE_DIR"] = "off"
    compile._ask_child = Compiler(suite).compile
    with bpf_programs.watched(report):
        bpf_programs.load_probes()
        bpf_programs.load_sampler()
        bpf_programs.variants()
        bpf_programs.everything_loaded()
    return rows


def check_apart(suite: str) -> list[dict[str, Any]]:
    """The same in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--rows", suite]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * TIME_LIMIT_S)
    if done.returncode:
        return [{"step": "failed", "what": done.stderr.strip() or f"it ended with {done.returncode}"}]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the rows of a check, each in words."""
    found = [f"{row['program']} ({row['backend']}): {row['output']}" for row in rows if not row.get("loaded", True)]
    found += [f"{row['step']}: {row['detail']}" for row in rows if not row.get("on", True)]
    found += [row["what"] for row in rows if row["step"] == "failed"]
    if not any(row["step"] == "program" for row in rows):
        found.append("no program was loaded")
    return found


def show(suite: str, rows: Sequence[dict[str, Any]]) -> bool:
    """Prints a compiler's lines. Returns whether all is right."""
    programs = [row for row in rows if row["step"] == "program"]
    loaded = [row for row in programs if row["loaded"]]
    most = max((row["verified"] for row in loaded), default=0)
    wrong = faults(rows)
    name = Compiler(suite).name
    print(f"{name} ({suite}): {len(loaded)} of {len(programs)} programs load on Linux {os.uname().release}, "
          f"at most {most:,} instructions verified: {'WRONG' if wrong else 'right'}")  # fmt: skip
    for row in rows:
        if row["step"] in ("probes", "sampler"):
            print(f"  {row['detail']}")
    for line in wrong:
        print(f"  {line}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/compilers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of Debian (default: {' '.join(SUITES)})")
    parser.add_argument("--fetch", action="store_true", help="only fetch them")
    parser.add_argument("--mirror", metavar="URL", default="", help="of Debian (default: the one that apt uses)")
    parser.add_argument("--keyring", default=debian.KEYRING, help="with Debian's keys (default: %(default)s)")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.suites or list(SUITES)
    if bad := [name for name in names if not re.fullmatch(r"[a-z][a-z-]*", name)]:
        parser.error(f"no suite: {', '.join(bad)}")
    if options.rows:
        json.dump(check(names[0]), sys.stdout)
        return 0
    try:
        debian.require((("apt-get", "apt"), ("dpkg-deb", "dpkg")))
        BUILD.mkdir(parents=True, exist_ok=True)
        for name in names:
            Compiler(name).fetch(options.mirror, options.keyring)
    except debian.Failure as failure:
        print(f"compilers: {failure}", file=sys.stderr)
        return 1
    if options.fetch:
        return 0
    right = [show(name, check_apart(name)) for name in names]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
