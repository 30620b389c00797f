"""scripts/demo and scripts/test on other distributions than this machine's, on this machine's kernel: each in a minimal
root (debootstrap) that nobody has installed anything in, from a clean clone of what is committed here.

A root is made of the distribution's archive as this machine's apt reaches it, with this machine's settings of apt and
pip; then scripts/setup installs there what it finds missing. Mounts are in a namespace of their own, which ends with
the run, however it ends. Nothing is installed on this machine, and no time limit is set.

  scripts/distros                       Debian 12 and 13; Ubuntu 22.04 and 24.04 where apt has a mirror of Ubuntu
  scripts/distros debian13 --only demo
  scripts/distros debian13 -- tests/kernel -x     what scripts/test gets: a part of the tests
  scripts/distros --bare                without /dev/pts, tracefs and bpf mounted, as in a container
  scripts/distros --table               only the table of what was run

Needs root, debootstrap and apt. The first time a distribution takes 2 minutes more, and 4 GB in build/distros in all
(or in --folder). Standard library only: .venv need not be there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import debian
from debian import Failure

ROOT = Path(__file__).resolve().parents[1]
CLONE = "/root/argus"
FREE_BYTES = 8 << 30


@dataclass(frozen=True)
class Distribution:
    """Where a distribution comes from, and with whose keys."""

    title: str
    origin: str
    suite: str
    components: str
    keyring: str


DISTRIBUTIONS = {
    "debian12": Distribution("Debian 12", "Debian", "bookworm", "main", debian.KEYRING),
    "debian13": Distribution("Debian 13", "Debian", "trixie", "main", debian.KEYRING),
    **{
        f"ubuntu{number.replace('.', '')}": Distribution(
            f"Ubuntu {number}", "Ubuntu", suite, "main,universe", "/usr/share/keyrings/ubuntu-archive-keyring.gpg"
        )
        for number, suite in (("22.04", "jammy"), ("24.04", "noble"))
    },
}
# What a machine has and a root lacks. $1: the root; $2: what pip reads from folders of this machine, a line each; $3:
# "bare" or nothing; then the command. Runs in a mount namespace of its own.
ENTER = """
set -eu
root=$1 folders=$2 bare=$3
shift 3
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
for name in null zero full random urandom tty; do
  : >"$root/dev/$name"
  mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mkdir "$root/dev/shm"
mount -t tmpfs shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs -o mode=755 run "$root/run"
if [ -z "$bare" ]; then
  mkdir "$root/dev/pts"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"
  mount -t tracefs tracefs "$root/sys/kernel/tracing"
  mount -t bpf bpf "$root/sys/fs/bpf"
  mount -t securityfs securityfs "$root/sys/kernel/security" 2>/dev/null || true
  mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup" 2>/dev/null || true
fi
echo "$folders" | while read -r folder; do
  [ -n "$folder" ] || continue
  mkdir -p "$root$folder"
  mount --bind -o ro "$folder" "$root$folder"
done
exec chroot "$root" "$@"
"""
VERSIONS = """
. /etc/os-release
clang=$(dpkg-query -W -f '${Package}\\n' 'libclang-cpp*' 'libclang1-*' 2>/dev/null | grep -o '[0-9.]*$' | head -1)
python3 -c 'import platform; print("python", platform.python_version())'
dpkg-query -W -f 'bcc ${Version}\\n' python3-bpfcc
dpkg-query -W -f 'glibc ${Version}\\n' libc6
echo "clang $clang"
echo "version $VERSION_ID"
"""
SUMMARY = re.compile(r"^=+ (.*\b(?:passed|failed|skipped|error|errors|no tests ran)\b.*) in [\d.]+s.*=+$")
OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")
SKIPPED = re.compile(r"^SKIPPED \[\d+\] (\S+?)(?::\d+)?: (.*)$")


def say(text: str) -> None:
    print(f"distros: {text}", file=sys.stderr, flush=True)


# ---- the root


def mounts_below(folder: Path) -> list[str]:
    """Places at or below a folder where something is mounted."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    whole = str(folder.resolve())
    return [place for place in places if place == whole or place.startswith(f"{whole.rstrip('/')}/")]


def remove(folder: Path) -> None:
    """Deletes a root, unless anything is mounted in it: what lies behind a mount is somebody else's.

    Raises:
        Failure: Something is.
    """
    if not folder.exists():
        return
    if mounted := mounts_below(folder):
        raise Failure(f"{mounted[0]} is a mount: unmount it first, nothing was deleted")
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(folder)], check=True)


def inhabitants(root: Path) -> Iterator[int]:
    """Processes whose root directory is this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "root") == str(root):
                    yield int(entry.name)
            except OSError:
                continue


def end_inhabitants(root: Path) -> None:
    """Ends what a run has left behind."""
    for _ in range(50):
        left = list(inhabitants(root))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not left:
            return
        time.sleep(0.1)


def outside_settings() -> list[str]:
    """How apt of this machine reaches archives."""
    done = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line.startswith("Acquire::") and not line.endswith(' "";')]


def pip_settings() -> str:
    """What pip of this machine is configured with, as a file for another."""
    sections: dict[str, list[str]] = {}
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if name and section != ":env:":
            sections.setdefault(section, []).append(f"{name} = {value[1:-1]}".replace("\\n", "\n  "))
    return "".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())


def environment() -> dict[str, str]:
    """What the commands get of this machine's environment: how to reach archives, and what is to be installed."""
    kept = (
        "PIP_",
        "NPM_CONFIG_",
        "npm_config_",
        "ARGUS_WITH_",
        "ARGUS_KERNEL_TESTS",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    )
    found = {key: value for key, value in os.environ.items() if key.startswith(kept) or key.lower() in kept}
    return found | {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
        "LANG": "C.UTF-8", "TERM": "xterm-256color", "DEBIAN_FRONTEND": "noninteractive",
    }  # fmt: skip


def local_folders() -> list[str]:
    """Folders of this machine that pip's settings name."""
    words = re.split(r"[\s,]+", pip_settings() + "\n" + "\n".join(environment().values()))
    paths = {Path(word.removeprefix("file://")) for word in words if word.startswith(("/opt/", "file:///", "/srv/"))}
    # An index names files that lie beside its folder "simple".
    paths = {path.parent if path.name == "simple" else path for path in paths if path.exists()}
    folders = {path if path.is_dir() else path.parent for path in paths}
    return sorted(str(folder) for folder in folders)


def constraints() -> list[str]:
    """Files of this machine that bound what pip installs."""
    words = re.findall(r"^\s*constraint\s*=\s*(.+)$", pip_settings(), re.MULTILINE)
    words.append(environment().get("PIP_CONSTRAINT", ""))
    return [word for line in words for word in line.split() if word.startswith("/")]


def make_base(name: str, folder: Path, site: str) -> Path:
    """A minimal root of a distribution, as its archive has it; made once."""
    which = DISTRIBUTIONS[name]
    base = folder / "base"
    if base.is_dir():
        return base
    if not Path(which.keyring).is_file():
        raise Failure(f"the archive keys of {which.origin} are missing: apt-get install {Path(which.keyring).stem}")
    part = folder / "base.part"
    remove(part)
    say(f"{which.title}: making a minimal root")
    command = [
        "debootstrap", "--variant=minbase", "--include=ca-certificates", f"--components={which.components}",
        f"--keyring={which.keyring}", which.suite, str(part), site,
    ]  # fmt: skip
    if which.suite == "noble" and not Path("/usr/share/debootstrap/scripts/noble").exists():
        command.append("gutsy")  # the script of all of Ubuntu's suites
    with (folder / "debootstrap.log").open("w") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        finally:
            for place in reversed(mounts_below(part)):
                subprocess.run(["umount", "--lazy", place], check=False)
    if done.returncode:
        last = (folder / "debootstrap.log").read_text().strip().splitlines()[-1:]
        raise Failure(f"debootstrap failed: {last[0] if last else done.returncode}")
    part.rename(base)
    return base


def make_root(base: Path, root: Path) -> None:
    """A fresh copy of a minimal root, with this machine's settings and a clean clone."""
    remove(root)
    if shutil.disk_usage(base).free < FREE_BYTES:
        raise Failure(f"less than {FREE_BYTES >> 30} GiB are free in {base.parent}")
    subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)
    (root / "etc/apt/apt.conf.d/90outside").write_text("\n".join(outside_settings()) + "\n")
    (root / "etc/pip.conf").write_text(pip_settings())
    for path in ("/etc/hosts", "/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt", *constraints()):
        if Path(path).is_file():
            target = root / path[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy(path, target)
    clone = root / CLONE[1:]
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", f"file://{ROOT}", str(clone)], check=True)


def renew_clone(clone: Path) -> None:
    """Brings the clone of a root that was kept to what is committed here; what is not in git, as .venv, stays."""
    for words in (["fetch", "--quiet", f"file://{ROOT}", "HEAD"], ["reset", "--quiet", "--hard", "FETCH_HEAD"]):
        subprocess.run(["git", "-C", str(clone), *words], check=True)


# ---- the run


def within(root: Path, words: Sequence[str], log: Path, *, bare: bool) -> int:
    """Runs a command in a root, in its clone. Returns its exit code."""
    command = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", ENTER, "sh"]
    there = ["sh", "-c", f'cd {CLONE} 2>/dev/null || cd /; exec "$@"', "sh", *words]
    arguments = [str(root), "\n".join(local_folders()), "bare" if bare else "", *there]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment(), start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            end_inhabitants(root)


def outcomes(text: str) -> tuple[Counter[str], list[str]]:
    """What pytest counted in all of its runs of a log, and which tests were skipped and why, in order."""
    counted: Counter[str] = Counter()
    skipped = []
    for line in text.splitlines():
        line = re.sub(r"\x1b\[[\d;]*m", "", line)
        if found := SUMMARY.match(line):
            for number, what in OUTCOME.findall(found[1]):
                counted[what.removesuffix("s") if what.startswith("error") else what] += int(number)
        elif found := SKIPPED.match(line):
            skipped.append(f"{found[1]}: {found[2]}")
    return counted, sorted(skipped)


def run(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Makes a root and runs both commands there.

    Raises:
        Failure: There is no such root.
    """
    which = DISTRIBUTIONS[name]
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    base = make_base(name, folder, options.mirror or debian.mirror(which.origin))
    root = folder / "root"
    if options.keep and root.is_dir():
        renew_clone(root / CLONE[1:])
    else:
        make_root(base, root)
    head = subprocess.run(["git", "-C", str(root / CLONE[1:]), "rev-parse", "--short", "HEAD"], capture_output=True)
    result: dict[str, Any] = {"name": name, "title": which.title, "commit": head.stdout.decode().strip()}
    steps = {"demo": ["scripts/demo"], "test": ["scripts/test", *options.words]}
    for step, words in steps.items():
        if options.only not in ("", step):
            continue
        say(f"{which.title}: {shlex.join(words)} (log: {folder / step}.log)")
        started = time.monotonic()
        code = within(root, words, folder / f"{step}.log", bare=options.bare)
        result[step] = {"code": code, "seconds": round(time.monotonic() - started)}
        if step == "test":
            counted, skipped = outcomes((folder / "test.log").read_text(errors="replace"))
            result[step] |= {"outcomes": counted, "skipped": skipped, "words": options.words}
    within(root, ["sh", "-c", VERSIONS], folder / "versions.log", bare=options.bare)
    pairs = [line.split(None, 1) for line in (folder / "versions.log").read_text().splitlines()]
    result["versions"] = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    result["seconds"] = round(time.monotonic() - began)
    if not options.keep:
        remove(root)
    return result


# ---- the table


def is_right(result: dict[str, Any]) -> bool:
    """Whether everything that ran ended well."""
    return all(result[step]["code"] == 0 for step in ("demo", "test") if step in result)


def row(result: dict[str, Any]) -> list[str]:
    """A distribution's cells."""
    versions = result["versions"]
    demo, test = result.get("demo"), result.get("test")
    counted = test["outcomes"] if test else {}
    failed = counted.get("failed", 0) + counted.get("error", 0)
    counts = f"{counted.get('passed', 0):,} / {counted.get('skipped', 0):,} / {failed:,}" if test else "not run"
    return [
        result["title"],
        versions.get("python", "?"),
        versions.get("bcc", "?").partition("+")[0].partition("-")[0],
        versions.get("clang", "?"),
        versions.get("glibc", "?").partition("-")[0],
        "not run" if demo is None else "right" if demo["code"] == 0 else f"FAILED ({demo['code']})",
        counts + ("" if not test or test["code"] == 0 else f" (exit code {test['code']})"),
        f"{result['seconds'] / 60:.0f}",
    ]


def show(results: Sequence[dict[str, Any]]) -> bool:
    """Prints the table, and what one skips and another does not. Returns whether all is right."""
    heads = ["distribution", "Python", "bcc", "clang", "glibc", "demo", "passed / skipped / failed", "minutes"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for result in results:
        print(f"| {' | '.join(row(result))} |")
    same = True
    tested = [result for result in results if "test" in result]
    reasons = {result["title"]: Counter(result["test"]["skipped"]) for result in tested}
    for title, skipped in reasons.items():
        for other, theirs in reasons.items():
            if other != title and result_words(tested, title) == result_words(tested, other):
                for test, number in (skipped - theirs).items():
                    same = False
                    print(f"skipped on {title}, not on {other}: {test}" + (f" ({number})" if number > 1 else ""))
    for result in results:
        for step in ("demo", "test"):
            if step in result and result[step]["code"]:
                print(f"{result['title']}: scripts/{step} ended with {result[step]['code']}")
    return same and all(map(is_right, results))


def result_words(results: Sequence[dict[str, Any]], title: str) -> list[str]:
    """Which tests a distribution ran."""
    words: list[str] = next(result["test"]["words"] for result in results if result["title"] == title)
    return words


def chosen(options: argparse.Namespace) -> list[str]:
    """Distributions to run: those named, or all whose archive apt reaches."""
    if options.names:
        return list(options.names)
    names = []
    for name, which in DISTRIBUTIONS.items():
        try:
            debian.mirror(which.origin)
        except Failure as failure:
            say(f"{which.title} is left out: {failure}")
            continue
        names.append(name)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/distros", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DISTRIBUTIONS)}")
    parser.add_argument("--only", choices=("demo", "test"), default="", help="one of the commands")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "distros", help="for roots and logs")
    parser.add_argument("--mirror", metavar="URL", help="of the archive (default: the one that apt uses)")
    parser.add_argument("--bare", action="store_true", help="mount no devpts, tracefs and bpf in the root")
    parser.add_argument(
        "--keep", action="store_true", help="keep the root after the run, and use the one that was kept"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    options.words = words[split + 1 :]
    if bad := [name for name in options.names if name not in DISTRIBUTIONS]:
        parser.error(f"no such distribution: {', '.join(bad)} (there are {', '.join(DISTRIBUTIONS)})")
    folder = options.folder.resolve()
    results = []
    try:
        if not options.table:
            require()
        for name in chosen(options):
            file = folder / name / "result.json"
            if not options.table:
                result = run(name, folder / name, options)
                file.write_text(json.dumps(result, indent=1) + "\n")
            if file.is_file():
                results.append(json.loads(file.read_text()))
    except Failure as failure:
        say(str(failure))
        return 1
    return 0 if show(results) else 1


def require() -> None:
    """That this machine can do it.

    Raises:
        Failure: It cannot.
    """
    if os.geteuid() != 0:
        raise Failure("needs root: debootstrap, chroot, and BPF")
    debian.require((("debootstrap", "debootstrap"), ("apt-get", "apt"), ("unshare", "util-linux"), ("git", "git")))
    done = subprocess.run(
        ["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    if done.stdout.strip():
        say("what is not committed is not in the clone")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    sys.exit(main())
