"""From calls to meaning: steps, and which communicators on which ranks belong together."""
