"""What all layers above share: keys of operands, names of layers, samples, a worker thread, an error guard. Internal."""
