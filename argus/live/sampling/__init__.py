"""Stack samples, from the kernel's records to rows: the parts of ``argus.live.sides.stack_samples``."""
