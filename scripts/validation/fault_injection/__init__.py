"""Runs with a known fault, what is said of them, and whether what is recommended fixes them."""
