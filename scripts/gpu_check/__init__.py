"""Checks on a real GPU: ``scripts/gpu-check`` (docs/gpu.md)."""
