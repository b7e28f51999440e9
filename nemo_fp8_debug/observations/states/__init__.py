"""Weight gradients and optimizer states, and the steps of weights. Internal."""

#: of its tables in a record
PLACE = 4
