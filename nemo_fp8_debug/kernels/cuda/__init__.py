"""Kernels of a CUDA device, compiled by Numba. Internal."""
