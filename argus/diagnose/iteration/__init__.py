"""Findings by step times: regressions, stalls, hangs."""
