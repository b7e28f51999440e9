"""What every layer above shares: keys of operands, names of layers, samples, a worker thread, a guard around errors."""
