"""Send samples to experiment trackers. Each tracker has its own thread. Internal."""
