"""Count the GEMM operands of a running model into histograms. Internal."""
