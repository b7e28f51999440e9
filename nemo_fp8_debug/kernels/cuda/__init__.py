"""Kernels for CUDA devices, compiled by Numba. Internal."""
