"""Experiment trackers, each in a thread of its own. Internal."""
