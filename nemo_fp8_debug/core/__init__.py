"""Shared by all layers above: keys of operands, names of layers, samples, a worker thread, an error guard. Internal."""
