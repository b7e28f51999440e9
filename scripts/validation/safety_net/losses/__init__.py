"""Setups that same_losses.py trains with and without a monitor, by family."""
