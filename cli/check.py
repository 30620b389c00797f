"""``argus check``: whether tracing works on this machine."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from argus.live import preflight
from argus.model.errors import EXIT_UNAVAILABLE
from argus.model.text import printable
from argus.system import privileges

from .options import format_option
from .output import styled


@click.command()
@format_option()
def command(output_format: str) -> int:
    """Check whether tracing works on this machine, and what to do if not.

    Loads the real eBPF programs, probes this very process and counts what arrives. Changes nothing.
    Exit code: 0 if `argus trace` would work, 3 if not.

    \b
      sudo argus check
      sudo argus check --format json | jq '.features[] | select(.on | not)'
    """
    features = preflight.check_all()
    works = preflight.tracing_works(features)
    if output_format == "json":
        rows = [dataclasses.asdict(feature) for feature in features]
        report = {
            "schema": "argus.check/1",
            "tracing": works,
            "features": rows,
            "capabilities": privileges.of_verbs(),
        }
        click.echo(json.dumps(report, indent=2))
    else:
        width = max(len(feature.name) for feature in features)
        for feature in features:
            if feature.on:
                mark, colour = ("part", "yellow") if feature.partial else ("on", "green")
            else:
                mark, colour = "off", "red" if feature.needed else "yellow"
            line = f"{feature.name:<{width}}  {click.style(f'{mark:<4}', fg=colour)}  {printable(feature.detail)}"
            click.echo(line, file=styled(sys.stdout))
            if feature.fix:
                click.echo(f"{'':<{width}}        → {feature.fix}")
        click.echo()
        click.echo("Capabilities that verbs need; all others are given up by `argus trace` when it begins:")
        for verb, names in privileges.of_verbs().items():
            click.echo(f"  {verb:<14}  {', '.join(names) or 'none'}")
        click.echo()
        click.echo("Tracing works here." if works else "Tracing does not work here yet.")
    return 0 if works else EXIT_UNAVAILABLE
