"""Measure dumped tensors again under other recipes. Internal."""
