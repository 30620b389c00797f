"""Runs against runs: is it the same workload, what changed, by what it costs, and how sure that is."""
