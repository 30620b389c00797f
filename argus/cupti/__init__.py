"""CUPTI in traced processes: what the GPU did, and when, by NVIDIA's own clock.

``helper/`` runs inside the process and hands buffers over; everything else is outside: ``shared`` is the memory
between them, ``layouts`` how the records of each CUPTI version look, ``decode`` turns buffers into columns,
``collector`` is CUPTI in one process as Argus sees it.
"""

MINIMUM_SHARE = 0.1
"""The least share of the time for which GPU times can be recorded."""
