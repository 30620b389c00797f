"""A training cluster with faults, at record level: the rows that tracing it would have stored, and the truth beside."""
