"""Variables of an environment that are stored: settings of training libraries, without what looks like a secret."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from argus.model.environment import LONGEST, is_stored
from argus.system import redact

_IMAGE = ("CONTAINER_IMAGE", "IMAGE_NAME", "PYTORCH_BUILD_VERSION", "NVIDIA_PYTORCH_VERSION", "APPTAINER_CONTAINER",
          "SINGULARITY_CONTAINER", "SLURM_CONTAINER_IMAGE")  # fmt: skip
"""Variables that name the image of a container; ``container.image`` is the first that is set."""

_INJECTION, _OWN_HELPER = "CUDA_INJECTION64_PATH", "libargus_cupti.so"
"""How a process is armed: Argus's own doing. Another profiler's library there is a fact."""


def settings(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Facts (``env.NAME``, ``container.image``) of variables, each a name and a value."""
    facts = {}
    images = {}
    for name, value in variables:
        if not name or len(name) > LONGEST:
            continue
        value = value[: 4 * LONGEST]
        if name == _INJECTION and PurePosixPath(value).name == _OWN_HELPER:
            continue
        if name in _IMAGE and value:
            images[name] = redact.redacted([value])[0]
        elif is_stored(name) and "\n" not in value:
            facts[f"env.{name}"] = redact.redacted([f"{name}={value}"])[0].partition("=")[2]
    for name in _IMAGE:
        if name in images:
            return {**facts, "container.image": images[name]}
    return facts
