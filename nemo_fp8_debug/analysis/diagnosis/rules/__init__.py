"""Rules about operands, gradients, weights, inputs, the loss and settings. Internal."""
