"""Products of GEMMs, and gradients that ranks add up: whether what was returned is right. Internal."""

#: of its tables in a record
PLACE = 2
