"""Probes that come and go while a trace runs: how long they are waited for, those that came late, windows, pulses."""
