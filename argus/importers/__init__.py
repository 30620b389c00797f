"""Recordings and logs of other tools, as rows of the same tables."""
