"""What lies between GEMMs: norms, routers, attention scores. Internal."""
