"""Copies that ranks hold of the same tensor: whether they are equal. Internal."""

#: of its tables in a record
PLACE = 3
