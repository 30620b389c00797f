"""Where training steps begin and end."""
