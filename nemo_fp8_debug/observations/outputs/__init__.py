"""Outputs of GEMMs: how much of their error each operand brings. Internal."""
