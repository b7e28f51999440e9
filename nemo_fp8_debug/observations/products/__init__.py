"""Check the products of GEMMs, and gradients summed over ranks. Internal."""

#: position of this feature's tables in a record
PLACE = 2
