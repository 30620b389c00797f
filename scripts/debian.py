"""Packages of other suites of Debian than this machine's, for scripts/compilers, scripts/distros and scripts/kernels:
fetched by apt with a state of its own, their signatures checked, unpacked into a folder. Nothing is installed.

Only the standard library: scripts/setup runs this before there is a .venv.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MERGED = ("bin", "sbin", "lib", "lib64")
"""Links into /usr (since Debian 12), through which packages may name their files."""


class Failure(Exception):
    """Reported to the user in one line."""


def mirror(origin: str = "Debian") -> str:
    """Where apt of this machine gets a distribution from.

    Args:
        origin: As the archive's Release file names itself: "Debian" or "Ubuntu".

    Raises:
        Failure: It gets it from nowhere.
    """
    fields = "$(ORIGIN)\t$(LABEL)\t$(SITE)"
    command = ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    for line in lines:
        found, label, site = line.split("\t")
        if found == label == origin:
            return site
    raise Failure(f"apt has no mirror of {origin} here (apt-get update?): name one with --mirror")


class Suite:
    """A suite of Debian, which apt keeps apart from those of this machine.

    Args:
        folder: For apt's state.
        name: As "bookworm".
        site: Of a mirror.
        keyring: Whose keys its index must be signed with.
    """

    def __init__(self, folder: Path, name: str, site: str, keyring: str = KEYRING) -> None:
        self.folder = folder
        self.name = name
        apt = folder / "apt"
        for part in ("lists/partial", "cache/archives/partial"):
            (apt / part).mkdir(parents=True, exist_ok=True)
        (apt / "sources.list").write_text(f"deb [signed-by={keyring} arch=amd64] {site} {name} main\n")
        (apt / "status").touch()
        settings = {
            "Dir::Etc::sourcelist": apt / "sources.list", "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferences": "-", "Dir::Etc::preferencesparts": "-",
            "Dir::State": apt, "Dir::State::lists": apt / "lists", "Dir::State::status": apt / "status",
            "Dir::Cache": apt / "cache", "Acquire::Languages": "none", "APT::Architecture": "amd64",
            "APT::Sandbox::User": "root",  # who may write there
        }  # fmt: skip
        self._settings = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]

    def run(self, program: str, *words: str, within: Path | None = None) -> str:
        """What a program of apt prints."""
        command = [program, *self._settings, "-q", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=within, timeout=1800, check=False)
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise Failure(f"{program} {words[0]} failed: {lines[-1] if lines else done.returncode}")
        return done.stdout

    def dependencies(self, package: str) -> list[str]:
        """Names of the packages that a package depends on."""
        lines = self.run("apt-cache", "depends", "--important", package).splitlines()
        return [line.split()[-1] for line in lines if line.strip().startswith("Depends:")]

    def fetch_whole(self, packages: Sequence[str]) -> list[Path]:
        """Archives of packages and of everything that they need."""
        archives = self.folder / "apt" / "cache" / "archives"
        self.run("apt-get", "install", "-y", "--download-only", "--no-install-recommends", *packages)
        return sorted(archives.glob("*.deb"))


def unpack(archives: Sequence[Path], root: Path) -> None:
    """Unpacks packages into a folder, as in a merged /usr. Their scripts do not run.

    Raises:
        Failure: One is broken.
    """
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    for archive in archives:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as content:
            command = ["tar", "-x", "--keep-directory-symlink", "-f", "-", "-C", str(root)]
            done = subprocess.run(command, stdin=content.stdout, capture_output=True, check=False)
        if done.returncode or content.returncode:
            raise Failure(f"cannot unpack {archive.name}: {done.stderr.decode(errors='replace').strip()}")


def require(programs: Sequence[tuple[str, str]]) -> None:
    """That these are installed.

    Args:
        programs: Each with the name of its package.

    Raises:
        Failure: One is not.
    """
    for program, package in programs:
        if shutil.which(program) is None:
            raise Failure(f"{program} is missing: apt-get install {package}")
