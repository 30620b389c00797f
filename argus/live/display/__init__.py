"""What the live view shows of a running trace, made from the tracer's memory."""
