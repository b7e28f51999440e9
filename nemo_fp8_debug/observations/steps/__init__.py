"""Scalars that a framework reports for each step and each evaluation. Internal."""

#: position of this feature's tables in a record
PLACE = 7
