"""What a rank did in each step."""
