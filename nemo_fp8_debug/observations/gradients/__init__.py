"""Gradients of weights, before they are unscaled or clipped. Internal."""

#: position of this feature's tables in a record
PLACE = 5
