"""What people look at: one page about a run, as a file or live."""
