"""The kernel side: which processes, which probes, and what they report, as columns."""
