"""From a running model to sketches of its GEMM operands."""
