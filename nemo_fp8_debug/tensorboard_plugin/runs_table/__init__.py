"""The table of all runs. Internal."""
