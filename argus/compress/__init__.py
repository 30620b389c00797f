"""Kernel durations in a few bytes: what a kernel usually looks like is stored once, and each step's deviations from it."""
