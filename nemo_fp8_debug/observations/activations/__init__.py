"""What lies between GEMMs: norms, routers, attention scores. Internal."""

#: of its tables in a record
PLACE = 6
