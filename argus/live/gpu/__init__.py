"""GPU times, from CUPTI's records to rows: the parts of ``argus.live.sides.gpu_times``."""
