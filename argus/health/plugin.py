"""Executables as checks, by the convention of Nagios plug-ins: https://www.monitoring-plugins.org/doc/guidelines.html.

Exit code 0 to 3 is the status, the first line of output the text, and what follows ``|`` in it the figures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from argus.health.check import ABSENT, CRITICAL, OK, UNKNOWN, WARNING
from argus.health.isolate import die_with_parent
from argus.model.units import binary_size
from argus.system import files

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_STATUSES = {0: OK, 1: WARNING, 2: CRITICAL, 3: UNKNOWN, 4: ABSENT}
_FIGURE = re.compile(r"(?:'([^'=]+)'|([^\s'=]+))=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?=[a-zA-Z%;\s]|$)")
_MAX_OUTPUT = 64 << 10


def run(file: str, note: Any) -> dict[str, Any]:
    """Runs a plug-in, without a time limit of its own, and returns a result's fields."""
    whose = ""
    if os.geteuid() == 0:
        try:
            whose = str((files.changeable(Path(file).absolute()) or [""])[0])
        except OSError as failure:
            return {"status": UNKNOWN, "text": f"cannot be run: {failure.strerror}"}
    if whose:
        text = f"not run: others than root may change {whose}"
        return {"status": UNKNOWN, "text": text, "hint": f"chown root:root {whose}; chmod go-w {whose}"}
    note(f"running {file}")
    try:
        process = subprocess.Popen(
            [file],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            cwd="/",
            preexec_fn=die_with_parent,
        )
    except OSError as failure:
        hint = f"See its first line (#!/bin/sh): head -1 {file}"
        return {"status": UNKNOWN, "text": f"cannot be run: {failure.strerror}", "hint": hint}
    assert process.stdout is not None
    output = process.stdout.read(_MAX_OUTPUT)
    more = process.stdout.read(1)
    if more:
        process.kill()
        return {"status": UNKNOWN, "text": f"printed more than {binary_size(_MAX_OUTPUT)}"}
    code = process.wait()
    line = output.decode(errors="replace").strip().partition("\n")[0]
    if line.startswith("{"):
        try:
            return {"status": _STATUSES.get(code, UNKNOWN), **json.loads(line)}
        except ValueError:
            return {"status": UNKNOWN, "text": f"printed broken JSON: {line}"}
    text, _, figures = line.partition("|")
    if code not in _STATUSES:
        return {"status": UNKNOWN, "text": f"ended with exit code {code}, which means nothing: {text or 'no output'}"}
    values = {a or b: float(value) for a, b, value in _FIGURE.findall(figures)}
    return {"status": _STATUSES[code], "text": text.strip() or "no output", "figures": values}
