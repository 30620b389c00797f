"""Says that it is there, and waits for its input to end. Runs on any CPython 3."""

import sys

print("here", flush=True)
sys.stdin.read()
