"""Weight gradients, optimizer states and steps of weights. Internal."""

#: position of this feature's tables in a record
PLACE = 4
