"""What a host reports of each step and of its evaluations. Internal."""
