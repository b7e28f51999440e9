"""Tensors between GEMMs: norms, routers, attention scores. Internal."""

#: position of this feature's tables in a record
PLACE = 6
