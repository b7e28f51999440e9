"""Pure functions of low precision: formats, scaling rules, sketches and the figures made from them."""
