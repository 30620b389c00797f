"""Which communicators belong together, what they are for, and how far clocks are apart."""
