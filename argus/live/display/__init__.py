"""A running trace as people see it, from memory alone."""
