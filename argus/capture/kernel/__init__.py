"""The kernel's interfaces: compiled BPF programs, maps, rings, types."""
