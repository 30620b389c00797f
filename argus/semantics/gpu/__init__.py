"""What the GPUs did, and how it belongs to calls and steps."""
