"""Why: CPU time, contention, stacks, node health."""
