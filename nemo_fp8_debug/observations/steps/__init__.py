"""Scalars that a framework reports for each step and for its evaluations. Internal."""

#: position of its tables in a record
PLACE = 7
