"""A recording of a profiler, whatever its format: steps, phases, groups, clocks, rows."""
