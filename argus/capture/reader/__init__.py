"""The process that reads files and memory of traced processes, and its answers."""
