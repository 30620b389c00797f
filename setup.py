"""Compiles the CUPTI helper into the wheel. Everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from argus.cupti import build  # noqa: E402 - from this tree, not from an installation
from argus.model.errors import ArgusError  # noqa: E402


class BuildWithHelper(build_py):
    """Copies the package, then compiles the helper beside it (for an editable install: in this tree)."""

    def run(self) -> None:
        super().run()
        try:
            if not self.editable_mode:
                self._made = build.compile_helper(Path(self.build_lib) / "argus" / "cupti")
            elif build.stale(build.PACKAGE):
                build.compile_helper(build.PACKAGE)
        except ArgusError as failure:
            sys.exit(f"error: {failure}")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, getattr(self, "_made", []))]


class WheelForEveryPython(bdist_wheel):
    """The helper is plain C and knows nothing of Python: one wheel an architecture."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    """Belongs into platlib, and its wheel to a platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithHelper, "bdist_wheel": WheelForEveryPython})
