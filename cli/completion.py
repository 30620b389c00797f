"""What TAB completes from the store: job names, runs and ranks."""

from __future__ import annotations

import click


def complete_job(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return []


def complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return []


def complete_rank(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return []
