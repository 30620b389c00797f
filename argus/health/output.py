"""A run in words and numbers: one line, JSON, Nagios, and Prometheus' text files."""

from __future__ import annotations

import json

from argus.health.check import ABSENT, CRITICAL, EXIT_CODES, OK, UNKNOWN, WARNING, Result
from argus.health.run import Run
from argus.model.text import printable
from argus.model.units import binary_size, seconds

_ORDER = (CRITICAL, WARNING, UNKNOWN, OK, ABSENT)


def line(run: Run) -> str:
    """One line: status, host, what is wrong, how many checks were fine."""
    bad = [r for r in _sorted(run.results) if r.status not in (OK, ABSENT)]
    shown = bad if bad or run.status == OK else run.results  # nothing was there to look at
    text = "; ".join(f"{_word(r)}{r.name}: {r.text}" for r in shown) or "all is well"
    counts = [f"{sum(r.status == OK for r in run.results)} ok"]
    counts += [f"{n} {word}" for word in (UNKNOWN, ABSENT) if (n := sum(r.status == word for r in run.results))]
    again = ", by the last run: another one is under way" if run.again else ""
    lost = f", {run.stored}" if run.stored.startswith("history: ") else ""
    return f"{run.status.upper()}  {run.host}: {text} ({', '.join(counts)}{again}{lost})"


def details(run: Run) -> str:
    """A line for each check, the worst first, with what to do; one for those with nothing to look at; the cost."""
    width = max((len(r.name) for r in run.results), default=0)
    lines = [line(run)]
    absent = [result.name for result in run.results if result.status == ABSENT]
    for result in _sorted(run.results):
        if result.status == ABSENT:
            continue
        lines.append(f"  {result.status:<8}  {result.name:<{width}}  {result.text}")
        if result.hint:
            lines.append(f"  {'':<8}  {'':<{width}}  → {result.hint}")
    if absent:
        lines.append(f"  {ABSENT:<8}  nothing to look at for {', '.join(absent)} (--format json gives the reasons)")
    lines.append(
        f"  took {seconds(run.wall_s)}, {seconds(run.cpu_s)} of CPU, {binary_size(run.rss_bytes)}"
        + (f"; {run.stored}" if run.stored else "")
    )
    return "\n".join(lines)


def as_json(run: Run) -> str:
    """One JSON object: schema ``argus.health/1``."""
    return json.dumps({**run.as_json(), "exit_code": EXIT_CODES[run.status]}, indent=2)


def nagios(run: Run) -> str:
    """The line and performance data, as monitoring-plugins.org defines them."""
    text = line(run).replace("|", "/")
    counts = [f"{status}={sum(r.status == status for r in run.results)}" for status in _ORDER]
    figures = [f"'{_nagios(r.name)}.{_nagios(name)}'={v:.12g}" for r in run.results for name, v in r.figures.items()]
    return f"{text} | {' '.join([*counts, f'time={run.wall_s:.2f}s', *figures])}"


def prometheus(run: Run) -> str:
    """For node_exporter's textfile collector: write it to a file there by ``--output``."""
    host = _label(run.host)
    lines = [
        "# HELP argus_health_status 0 ok, 1 warning, 2 critical, 3 unknown; absent checks are missing.",
        "# TYPE argus_health_status gauge",
        *(
            f'argus_health_status{{host="{host}",check="{_label(r.name)}"}} {EXIT_CODES[r.status]}'
            for r in run.results
            if r.status != ABSENT
        ),
        "# HELP argus_health_figure What checks measured; names end in their unit.",
        "# TYPE argus_health_figure gauge",
    ]
    for result in run.results:
        for key, value in result.figures.items():
            figure, _, device = key.partition("/")
            labels = f'host="{host}",check="{_label(result.name)}",figure="{_label(figure)}",device="{_label(device)}"'
            lines.append(f"argus_health_figure{{{labels}}} {value:.17g}")
    for name, value, help_text in (
        ("run_timestamp_seconds", run.at, "When the run began, Unix time."),
        ("run_seconds", run.wall_s, "How long it took."),
        ("run_cpu_seconds", run.cpu_s, "CPU time it took."),
        ("run_rss_bytes", run.rss_bytes, "Memory of the largest of its processes."),
    ):
        lines += [f"# HELP argus_health_{name} {help_text}", f"# TYPE argus_health_{name} gauge"]
        lines.append(f'argus_health_{name}{{host="{host}"}} {value:.17g}')
    return "\n".join(lines)


def _sorted(results: list[Result]) -> list[Result]:
    return sorted(results, key=lambda result: _ORDER.index(result.status))


def _word(result: Result) -> str:
    return "unknown: " if result.status == UNKNOWN else ""


def _label(text: str) -> str:
    return printable(text.replace("\n", " ")).replace("\\", "\\\\").replace('"', '\\"')


def _nagios(text: str) -> str:
    return "".join("_" if c in "'=| " else c for c in text)


FORMATS = {"text": line, "json": as_json, "nagios": nagios, "prometheus-textfile": prometheus}
