"""Find the tensor and the layer that went wrong first, and the cause. Internal."""
