"""What observing costs the traced jobs, and how that is kept within a budget."""
