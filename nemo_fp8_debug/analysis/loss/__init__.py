"""Evaluate the loss of a run: its rises, its jumps and its gap to a baseline. Internal."""
