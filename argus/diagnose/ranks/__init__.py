"""Findings by comparing ranks: late ones, slow GPUs, links, the layout."""
