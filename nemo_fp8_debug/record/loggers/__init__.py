"""Send samples to experiment trackers, each in a thread of its own. Internal."""
