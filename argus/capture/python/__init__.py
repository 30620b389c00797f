"""The CPython interpreter inside a process, seen from outside."""
