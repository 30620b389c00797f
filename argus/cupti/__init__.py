"""CUPTI in traced processes: what the GPU did, and when, by NVIDIA's own clock.

``helper/`` runs inside the process and hands buffers over; everything else is outside: ``shared`` is the memory
between them, ``layouts`` how the records of each CUPTI version look, ``decode`` turns buffers into columns,
``collector`` is CUPTI in one process as Argus sees it.
"""

MINIMUM_SHARE = 0.1
"""The least share of the time for which GPU times can be recorded."""
RAW_MODES = ("auto", "all", "flagged")
"""Which operations are stored one by one: up to ``RAW_ROWS_S`` and what is flagged; all; only what is flagged."""
RAW_ROWS_S = 50_000.0
"""Operations a second and job that a host stores one by one: 0.3 MB a second on disk."""
