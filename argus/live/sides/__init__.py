"""What a trace observes, one file a side (``argus.live.side``), and what they are made of."""
