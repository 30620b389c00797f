"""Finds eBPF's ``bcc`` wherever the distribution put it, and points it at the bundled stub headers.

``bcc`` is not on PyPI (the package of that name there is unrelated): distributions install it for their own Python
only. It is plain Python over ctypes, so any interpreter can import it from that place.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.system.resources import resource_dir

INSTALL_HINT = (
    "Install it: `apt install python3-bpfcc` (Debian, Ubuntu), `dnf install python3-bcc` (Fedora, RHEL); "
    "PyPI's `bcc` is a different package"
)


def _search_path() -> list[Path]:
    """Directories where distributions keep modules of the system's Python, likeliest first."""
    places = [Path("/usr/lib/python3/dist-packages")]
    for root in (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib")):
        for pattern in ("python3*/site-packages", "python3*/dist-packages"):
            places.extend(sorted(root.glob(pattern), reverse=True))
    purelib = sysconfig.get_paths().get("purelib")
    if purelib:
        places.append(Path(purelib))
    return places


def find() -> Path | None:
    """The directory of the ``bcc`` package that is eBPF's, or None. Imports nothing."""
    for place in _search_path():
        package = place / "bcc"
        # The lattice package of the same name has no libbcc.
        if (package / "libbcc.py").is_file():
            return package
    return None


def require() -> Path:
    """The same, or an error that says how to install it.

    Raises:
        ArgusError: It is not installed.
    """
    package = find()
    if package is None:
        raise ArgusError("bcc, which compiles eBPF programs, is not installed", INSTALL_HINT, EXIT_UNAVAILABLE)
    return package


@cache
def load() -> ModuleType:
    """Imports eBPF's bcc and has it compile against ``bpf/include``.

    Raises:
        ArgusError: It is not installed, or its shared library does not load.
    """
    package = require()
    # Without kernel headers bcc would look in /lib/modules; the stub tree serves every kernel (docs/design.md).
    os.environ["BCC_KERNEL_SOURCE"] = str(resource_dir("bpf") / "include")
    spec = importlib.util.spec_from_file_location(
        "bcc", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get("bcc")
    sys.modules["bcc"] = module
    try:
        spec.loader.exec_module(module)
    except (OSError, ImportError) as reason:
        if previous is None:
            del sys.modules["bcc"]
        else:
            sys.modules["bcc"] = previous
        raise ArgusError(f"bcc at {package} does not load: {reason}", INSTALL_HINT, EXIT_UNAVAILABLE) from reason
    return module


def version() -> str:
    """bcc's own version, for example ``0.26.0``."""
    return str(getattr(load(), "__version__", "unknown"))
