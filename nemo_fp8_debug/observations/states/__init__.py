"""Weight gradients, optimizer states and steps of weights. Internal."""

#: position of its tables in a record
PLACE = 4
