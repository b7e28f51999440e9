"""Copies that ranks hold of the same tensor: whether they are equal. Internal."""
