"""Operands of GEMMs: how well FP8 represents each, in use and under other recipes. Internal."""

#: position of its tables in a record
PLACE = 1
