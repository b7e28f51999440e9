"""What a host reports of each step and of its evaluations. Internal."""

#: of its tables in a record
PLACE = 7
