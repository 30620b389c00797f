"""Benchmarks by name. Each measures ours and the reference in one run, interleaved, several times.

A bench is a module of ``scripts/benches`` with ``run(rounds) -> Result``; its docstring's first line is its help.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import benches

from argus.model.errors import ArgusError


def main() -> int:
    names = [module.name for module in pkgutil.iter_modules(benches.__path__) if not module.name.startswith("_")]
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=names)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions (default 5)")
    parser.add_argument("--quick", action="store_const", const=1, dest="rounds", help="a smoke test: one round")
    options = parser.parse_args()
    if options.name is None:
        for name in names:
            help_line = (importlib.import_module(f"benches.{name}").__doc__ or "").splitlines()[0]
            print(f"{name:<10} {help_line}")
        return 0
    module = importlib.import_module(f"benches.{options.name}")
    try:
        result = module.run(options.rounds)
    except ArgusError as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return failure.exit_code
    result.show()
    if options.json:
        print(json.dumps({"bench": options.name, **result.as_json()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
