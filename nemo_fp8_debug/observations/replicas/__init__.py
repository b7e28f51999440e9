"""Compare copies of a tensor over ranks. Internal."""

#: position of this feature's tables in a record
PLACE = 3
