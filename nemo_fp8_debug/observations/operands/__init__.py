"""Operands of GEMMs: how well FP8 represents each operand, in use and under other recipes. Internal."""

#: position of this feature's tables in a record
PLACE = 1
