"""Pure functions for low-precision numerics: formats, scaling rules, histograms and metrics. Internal."""
