"""Every BPF program of Argus, in kernels that this machine does not run: each kernel is fetched as Debian's package,
booted in QEMU, and there the programs are loaded and attached, this process's own calls and stack are looked for, and
`argus trace` follows a job on the fake GPU and a Python program. What is compiled is what Argus asks for in that
kernel, with its types; clang runs out here, where it takes seconds and not minutes, unless --compile-there is given.
The programs are loaded as each of several clangs compiles them (scripts/compilers); the rest is with this machine's.

A kernel is named by its suite of Debian: bullseye 5.10, bookworm 6.1, trixie 6.12, sid the newest. 5.10 is older than
what Argus supports: there only the verifier is asked, with older helpers for the three that 5.10 lacks.

Needs root, apt, qemu-system-x86 (no KVM: it emulates, some ten times as slow) and x86-64. The machine in QEMU sees this
one's files, and cannot write to them. A kernel takes 5 to 15 minutes and 1 GB on disk, all in build/kernels. What was
fetched is kept, and a kernel that was run with the same sources is not run again.

  scripts/kernels                       the four of them
  scripts/kernels bookworm --again      one, although nothing has changed
  scripts/kernels --programs            is each program taken, and do they work
  scripts/kernels --compilers trixie    with programs by clang 19 alone; "own": by this machine's clang alone
  scripts/kernels --table               only the table of what was run
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import compilers
import debian
from bpf_programs import TASKS
from debian import Failure
from elftools.elf.elffile import ELFFile

from argus.capture.kernel import compile

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "kernels"
GUEST = ROOT / "scripts" / "kernels_guest.py"
SUITES = ("bullseye", "bookworm", "trixie", "sid")
META_PACKAGE = "linux-image-amd64"
KERNEL_PACKAGES = re.compile(r"linux-(?:base|image|binary|modules)-\d\S*")
"""In sid the kernel, its modules and their list are packages of their own."""
MODULES = ("virtio_pci", "9pnet_virtio", "9p")
FREE_BYTES = 3 << 30
MEMORY_MIB = 3072
LEAST_SAMPLES = 100
RIGHT = 0.99
"""As in tests/kernel/test_python_stacks.py."""
# Mounts the host's root, and goes there. A program that is no shell could not be the first one in so few lines.
INIT = """#!/bin/busybox sh
PATH=/bin
for command in mount insmod mkdir switch_root cat; do busybox ln -s busybox /bin/$command; done
mount -t devtmpfs none /dev
exec </dev/console >/dev/console 2>&1
for module in $(cat /order); do insmod /modules/$module; done
share=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o ro,cache=loose,$share host /root
mount -t proc none /root/proc
mount -t sysfs none /root/sys
mount -t tracefs none /root/sys/kernel/tracing
mount -t bpf none /root/sys/fs/bpf
mount -t devtmpfs none /root/dev
mkdir -p /root/dev/shm
mount -t tmpfs none /root/dev/shm
mount -t tmpfs none /root/run
mkdir /root/run/out
mount -t 9p -o $share out /root/run/out
exec switch_root /root {command}
"""


def say(text: str) -> None:
    print(f"kernels: {text}", file=sys.stderr, flush=True)


# ---- the kernel


def packages(suite: debian.Suite) -> list[str]:
    """Those that hold the suite's kernel and its modules."""
    suite.run("apt-get", "update")
    images = [name for name in suite.dependencies(META_PACKAGE) if KERNEL_PACKAGES.fullmatch(name)]
    if not images:
        raise Failure(f"{suite.name} has no {META_PACKAGE} that is understood")
    return images + [name for name in suite.dependencies(images[0]) if KERNEL_PACKAGES.fullmatch(name)]


def fetch(suite: debian.Suite) -> Path:
    """The folder with the suite's newest kernel; fetched if it is not there."""
    wanted = packages(suite)
    unpacked = suite.folder / "root"
    complete = unpacked / ".packages"
    want = " ".join(wanted)
    if complete.is_file() and complete.read_text() == want:
        return unpacked
    if shutil.disk_usage(BUILD).free < FREE_BYTES:
        raise Failure(f"less than {FREE_BYTES >> 30} GiB are free in {BUILD}")
    say(f"{suite.name}: fetching {want}")
    shutil.rmtree(unpacked, ignore_errors=True)
    archives = suite.folder / "archives"
    archives.mkdir(exist_ok=True)
    suite.run("apt-get", "download", *wanted, "busybox-static", within=archives)
    for archive in archives.iterdir():
        subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
    shutil.rmtree(archives)
    complete.write_text(want)
    return unpacked


def only(found: Iterable[Path], what: str) -> Path:
    for path in found:
        return path
    raise Failure(f"the package has no {what}")


# ---- what it boots from


def module_image(path: Path) -> bytes:
    """A kernel module as insmod takes it."""
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def needs(image: bytes) -> list[str]:
    """Modules that a module needs, by its ``depends=`` in .modinfo."""
    section = ELFFile(io.BytesIO(image)).get_section_by_name(".modinfo")
    words = section.data().split(b"\0") if section is not None else []
    named = next((word[len(b"depends=") :] for word in words if word.startswith(b"depends=")), b"")
    return [name.replace("-", "_") for name in named.decode().split(",") if name]


def modules(folder: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """Images of modules and of what they need, in an order in which they can be loaded.

    Args:
        folder: ``/lib/modules/RELEASE``. What ``modules.builtin`` there names is in the kernel itself.
        wanted: Names, with underscores.
    """
    files = {path.name.partition(".ko")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    names = (Path(line).name.partition(".ko")[0] for line in (folder / "modules.builtin").read_text().splitlines())
    builtin = {name.replace("-", "_") for name in names}
    images: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in images or name in builtin:
            return
        if name not in files:
            raise Failure(f"the kernel has no module {name}")
        image = module_image(files[name])
        for other in needs(image):
            add(other)
        images[name] = image

    for name in wanted:
        add(name)
    return images


def archive(entries: Iterable[tuple[str, int, bytes, tuple[int, int]]]) -> bytes:
    """A cpio archive of the form "newc" (Documentation/driver-api/early-userspace/buffer-format.rst of the Linux tree).

    Args:
        entries: Path, mode, content, and major and minor number of a device.
    """
    out = io.BytesIO()
    for number, (path, mode, content, device) in enumerate([*entries, ("TRAILER!!!", 0, b"", (0, 0))], 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name), 0)
        out.write(b"070701" + b"".join(b"%08x" % field for field in fields) + name)
        out.write(bytes(-out.tell() % 4) + content)
        out.write(bytes(-out.tell() % 4))
    return out.getvalue()


def initramfs(busybox: bytes, images: dict[str, bytes], command: str) -> bytes:
    """What the kernel unpacks: it loads the modules, mounts this machine's root and goes to ``command`` there."""
    none = (0, 0)
    entries = [(name, stat.S_IFDIR | 0o755, b"", none) for name in ("bin", "dev", "modules", "root")]
    entries += [
        ("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)),
        ("bin/busybox", stat.S_IFREG | 0o755, busybox, none),
        ("order", stat.S_IFREG | 0o644, "\n".join(images).encode(), none),
        ("init", stat.S_IFREG | 0o755, INIT.format(command=command).encode(), none),
    ]
    entries += [(f"modules/{name}", stat.S_IFREG | 0o644, image, none) for name, image in images.items()]
    return archive(entries)


# ---- the run


def sources() -> str:
    """Of all that a result depends on but the kernel."""
    seen = hashlib.sha256()
    files = [path for place in ("bpf", "argus", "cli") for path in (ROOT / place).rglob("*")]
    files = [path for path in files if path.suffix in (".c", ".h", ".py")]
    for path in sorted([*files, Path(__file__).resolve(), GUEST, GUEST.with_name("bpf_programs.py")]):
        seen.update(path.read_bytes())
    return seen.hexdigest()[:16]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What the machine reported so far; a line that is being written is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def clang(row: dict[str, Any]) -> str:
    """The compiler that a row is about, as the beginning of a name."""
    return f"{compilers.Compiler(row['compiler']).name}; " if row.get("compiler") else ""


def progress_line(row: dict[str, Any]) -> str:
    """One row as a line of progress; empty: of no interest."""
    if row["step"] == "program":
        where = f"{row['program']} ({clang(row)}{TASKS[row['backend']]})"
        if row["loaded"]:
            return f"{where}: loaded, {row['verified']:,} instructions verified, {row['seconds']} s"
        return f"{where}: REFUSED: {row['output']}"
    if row["step"] in ("probes", "sampler"):
        return f"{row['step']}: {'works' if row['on'] else 'FAILS'}: {row['detail']}"
    if row["step"] == "failed":
        return f"FAILED: {row['what']}"
    if row["step"] == "done":
        return f"{row['what']} took {row['seconds']} s"
    return f"Linux {row['release']} is up" if row["step"] == "begin" else ""


def compile_asked(out: Path) -> None:
    """Answers what the machine asks to be compiled."""
    for request in out.glob("compile-*.json"):
        answer = request.with_suffix(".answer")
        if answer.exists():
            continue
        asked = json.loads(request.read_text())
        suite = asked.pop("compiler")
        try:
            made = (compilers.Compiler(suite).compile if suite else compile._ask_child)(**asked)
        except compile.CompileError as failure:
            made = {"error": str(failure)}
        unfinished = request.with_suffix(".new")
        unfinished.write_text(json.dumps(made))
        unfinished.rename(answer)


def run(suite: str, unpacked: Path, limit_s: float, words: Sequence[str]) -> dict[str, Any]:
    """Boots a kernel and returns what came of it.

    Args:
        suite: Whose kernel it is.
        unpacked: What ``fetch`` gave.
        limit_s: For all of it.
        words: Options of scripts/kernels_guest.py.

    Raises:
        Failure: It did not come up, or did not end in time.
    """
    release_folder = only((path.parent for path in unpacked.rglob("modules.builtin")), "modules")
    kernel = only((path for path in unpacked.rglob("vmlinuz*") if path.is_file()), "kernel")
    folder = BUILD / suite
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    lines, console = out / "output.jsonl", folder / "console.log"
    busybox = only(unpacked.rglob("bin/busybox"), "busybox").read_bytes()
    image = folder / "initramfs"
    guest = " ".join([f"{ROOT}/.venv/bin/python", str(GUEST), *words])
    image.write_bytes(initramfs(busybox, modules(release_folder, MODULES), guest))
    share = "local,security_model=none,mount_tag="
    # no_timer_check: where the host is busy the timer seems not to work, and Linux ends (setup_IO_APIC).
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MIB),
        "-nodefaults", "-nographic", "-no-reboot", "-serial", f"file:{console}",
        "-kernel", str(kernel), "-initrd", str(image), "-append", "console=ttyS0 panic=-1 quiet no_timer_check",
        "-virtfs", f"{share}host,path=/,readonly=on,multidevs=remap", "-virtfs", f"{share}out,path={out}",
    ]  # fmt: skip
    # What Argus imports, as bytecode: the machine cannot write it here, and takes a minute for it.
    bytecode = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    imports = "import argus.cli.main, argus.cli.session, kernels_guest"
    subprocess.run([sys.executable, "-c", imports], cwd=GUEST.parent, env=bytecode, check=True)
    began, shown, of = time.monotonic(), 0, sources()
    machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while machine.poll() is None:
            if time.monotonic() - began > limit_s:
                raise Failure(f"{suite}: not done after {limit_s:.0f} s (--limit); its console: {console}")
            time.sleep(0.5)
            compile_asked(out)
            rows = rows_of(lines)
            for row in rows[shown:]:
                if text := progress_line(row):
                    say(f"{suite}: {text}")
            shown = len(rows)
    finally:
        machine.kill()
        _, errors = machine.communicate()
    rows = rows_of(lines)
    if not rows or rows[-1]["step"] != "end":
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"its console: {console}"]
        raise Failure(f"{suite}: the machine ended before it was done; {last[0]}")
    seconds = round(time.monotonic() - began)
    return {
        "suite": suite,
        "package": release_folder.name,
        "sources": of,
        "seconds": seconds,
        "words": list(words),
        "rows": rows,
    }


# ---- the table


def groups(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """Of each way to load programs: its name, what came of it, and whether that is right."""
    of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["step"] == "program":
            of.setdefault(f"{clang(row)}{TASKS[row['backend']]}", []).append(row)
    for name, programs in of.items():
        loaded = [row for row in programs if row["loaded"]]
        most = max((row["verified"] for row in loaded), default=0)
        yield name, f"{len(loaded)} of {len(programs)} load, most {most:,}", len(loaded) == len(programs)


def verdict(result: dict[str, Any]) -> tuple[list[tuple[str, str]], bool]:
    """What a kernel did, by name, and whether all of it is right."""
    rows = result["rows"]
    lines, right = [], not any(row["step"] == "failed" for row in rows)
    for name, text, is_right in groups(rows):
        lines.append((name, text))
        right &= is_right
    steps = {row["step"] for row in rows}
    right &= "program" in steps and (
        "refusal" in steps or "--programs" in result["words"] or {"truth", "trace"} <= steps
    )
    is_old = "refusal" in steps
    for row in rows:
        if row["step"] in ("probes", "sampler") and not is_old:
            name = clang(row) + ("own calls" if row["step"] == "probes" else "own stack")
            lines.append((name, row["detail"]))
            right &= row["on"]
        elif row["step"] == "truth":
            lines.append(("known stacks", f"{row['right']:.2%} of {row['samples']:,} right, {row['wrong']} wrong"))
            right &= row["samples"] >= LEAST_SAMPLES and row["right"] >= RIGHT and not row["wrong"]
        elif row["step"] == "trace":
            seen = {name: row["rows"].get(name, 0) for name in ("launches", "collectives", "stack_samples")}
            # busy.py computes in this function, and sleeps in a thread.
            seen |= {"stacks in inner()": row["functions"].get("inner", 0), "sleeps": row["reasons"].get("sleep", 0)}
            lines.append(("argus trace", ", ".join(f"{count:,} {name}" for name, count in seen.items())))
            coverage = [line.strip() for line in row["output"].splitlines() if "coverage:" in line]
            lines += [("", line) for line in coverage[-1:]]
            right &= row["code"] == 0 and all(seen.values())
        elif row["step"] == "refusal":
            lines.append(("argus trace", row["output"].strip()))
            right &= row["code"] == 3 and "too old" in row["output"]
        elif row["step"] == "failed":
            lines.append(("failed", row["what"].strip().splitlines()[-1]))
    return lines, right


def show(results: list[dict[str, Any]]) -> bool:
    """Prints the table. Returns whether all is right."""
    all_right = True
    for result in results:
        lines, right = verdict(result)
        all_right &= right
        width = max([20, *(len(name) for name, _ in lines)]) + 2
        print(f"Linux {result['package']} ({result['suite']}): {'right' if right else 'WRONG'}, {result['seconds']} s")
        for name, text in lines:
            print(f"  {name:<{width}}{text}")
    return all_right


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of Debian (default: {' '.join(SUITES)})")
    parser.add_argument("--mirror", metavar="URL", help="of Debian (default: the one that apt uses)")
    parser.add_argument("--keyring", default=debian.KEYRING, help="with Debian's keys (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="for each kernel (default: %(default)s)")
    parser.add_argument("--programs", action="store_true", help="load and attach programs, trace nothing: some minutes")
    parser.add_argument("--compile-there", action="store_true", help="run clang in that kernel, as a user would")
    parser.add_argument(
        "--compilers", metavar="SUITE,...", type=lambda text: text.split(","), default=list(compilers.SUITES),
        help=f"whose clang compiles what is loaded; own: this machine's (default: {','.join(compilers.SUITES)})",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="also what was run with the same sources")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    options = parser.parse_args()
    names = options.suites or list(SUITES)
    if bad := [name for name in names if not re.fullmatch(r"[a-z][a-z-]*", name)]:
        parser.error(f"no suite: {', '.join(bad)}")
    try:
        if not options.table:
            require()
        words = ["--programs"] * options.programs + ["--compile-here"] * options.compile_there
        chosen = [] if options.compile_there or options.compilers == ["own"] else options.compilers
        words += [f"--compilers={','.join(chosen)}"] if chosen else []
        for suite in [] if options.table else chosen:
            compilers.BUILD.mkdir(parents=True, exist_ok=True)
            compilers.Compiler(suite).fetch(options.mirror or "", options.keyring)
        results = []
        for name in names:
            file = BUILD / name / "result.json"
            result = json.loads(file.read_text()) if file.exists() else None
            if not options.table:
                site = options.mirror or debian.mirror()
                unpacked = fetch(debian.Suite(BUILD / name, name, site, options.keyring))
                if options.again or result is None or (result["sources"], result["words"]) != (sources(), words):
                    result = run(name, unpacked, options.limit, words)
                    file.write_text(json.dumps(result) + "\n")
            if result is not None:
                results.append(result)
    except Failure as failure:
        say(str(failure))
        return 1
    return 0 if show(results) else 1


def require() -> None:
    """That this machine can do it.

    Raises:
        Failure: It cannot.
    """
    if platform.machine() != "x86_64":
        raise Failure("needs an x86-64 machine")
    if os.geteuid() != 0:
        raise Failure("needs root: the machine in QEMU reads this one's files")
    debian.require((("qemu-system-x86_64", "qemu-system-x86"), ("apt-get", "apt"), ("dpkg-deb", "dpkg")))


if __name__ == "__main__":
    sys.exit(main())
