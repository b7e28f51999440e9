"""Gradients of weights, before they are unscaled or clipped. Internal."""

#: of its tables in a record
PLACE = 5
