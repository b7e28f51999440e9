"""Bands learned from many healthy runs, to judge a run that has no baseline. Internal."""
