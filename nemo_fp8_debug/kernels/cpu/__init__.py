"""Loops over CPU memory, compiled by Numba. Internal."""
