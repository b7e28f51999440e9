"""Bands learned from many healthy runs, for checking a run that has no baseline. Internal."""
