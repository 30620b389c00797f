"""The kernel side: which processes, which probes, and what they report, as columns."""

DEFAULT_RATE_HZ = 19
"""Samples of stacks a second and CPU: a prime, so that they do not march in step with timers. Continuous profilers take
as many (Parca's agent: 19, the OpenTelemetry one: 20): what a timer's interrupt costs is all that is left to save."""
RAISED_RATE_HZ = 97
"""The same while something is the matter with the job, and nobody has chosen a rate."""
DEFAULT_OFF_CPU_NS = 1_000_000
"""Time off the CPU from which on it is reported."""
