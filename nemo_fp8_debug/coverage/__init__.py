"""Report what a model multiplies and how much of it is observed, from its modules alone. Internal."""
