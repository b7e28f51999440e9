"""Benchmarks of the monitor and its analyses, one per script."""
