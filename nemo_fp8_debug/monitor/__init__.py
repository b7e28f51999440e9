"""Watches a training run: when to sample, what to capture, and where it goes. Internal."""
