"""Node health from cron: checks that run apart from each other, their history, and what stands out in it."""
