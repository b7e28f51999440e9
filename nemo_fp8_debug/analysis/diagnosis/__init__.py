"""Find which tensor of which layer went wrong, and why. Internal."""
