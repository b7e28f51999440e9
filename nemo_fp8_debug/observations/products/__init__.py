"""Check the products of GEMMs, and the gradients that ranks add up. Internal."""

#: position of its tables in a record
PLACE = 2
