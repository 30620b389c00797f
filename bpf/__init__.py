"""BPF programs, and the headers that they are compiled with."""
