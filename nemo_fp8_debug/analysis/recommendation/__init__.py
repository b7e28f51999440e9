"""What to change. Internal."""
