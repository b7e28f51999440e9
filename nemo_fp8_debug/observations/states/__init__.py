"""Weight gradients and optimizer states, and the steps of weights. Internal."""
