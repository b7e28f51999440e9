"""Two runs side by side. Internal."""
