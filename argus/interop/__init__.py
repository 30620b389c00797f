"""Stacks in the formats of other tools: folded text, speedscope, pprof, and a flame graph of our own."""
