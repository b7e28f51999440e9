"""Gradients of weights, before they are unscaled or clipped. Internal."""

#: position of its tables in a record
PLACE = 5
