"""From a running model to histograms of its GEMM operands. Internal."""
