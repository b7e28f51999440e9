"""Watch a training run: decide when to sample, what to capture, and where it goes. Internal."""
