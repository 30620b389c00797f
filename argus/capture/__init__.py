"""The kernel side: which processes, which probes, and what they report, as columns."""

DEFAULT_RATE_HZ = 97
"""Samples of stacks a second and CPU: a prime, so that they do not march in step with timers."""
DEFAULT_OFF_CPU_NS = 1_000_000
"""Time off the CPU from which on it is told."""
