"""Compare two runs. Internal."""
