"""Findings by kernels: durations, patterns, issue latency."""
