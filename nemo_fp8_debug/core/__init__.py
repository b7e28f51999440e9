"""Code that all other packages share: operand keys, layer names, samples, a worker thread, an error guard. Internal."""
