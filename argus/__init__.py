"""Argus finds out why a distributed GPU training job is slow, while it runs, without touching its code."""

__version__ = "0.1.0"
