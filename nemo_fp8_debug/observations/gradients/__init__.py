"""Gradients of weights, before they are unscaled or clipped. Internal."""
