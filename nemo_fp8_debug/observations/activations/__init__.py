"""Tensors between GEMMs: norms, routers, attention scores. Internal."""

#: position of its tables in a record
PLACE = 6
