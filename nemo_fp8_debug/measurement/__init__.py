"""Statistics of captured operands, and the metrics made of them. Internal."""
