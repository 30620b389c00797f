"""Stacks, and weighted sets of them."""
