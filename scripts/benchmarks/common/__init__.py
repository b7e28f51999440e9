"""What benchmarks share: a small GPT, and the timing of its steps."""
