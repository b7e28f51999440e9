"""Compare copies of a tensor over ranks. Internal."""

#: position of its tables in a record
PLACE = 3
