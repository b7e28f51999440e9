"""Observe the GEMM operands of a running model, and collect them in histograms. Internal."""
