"""One file a check: ``check(look)`` and its thresholds, ``LIMITS``."""
