"""Measure recorded tensors again under other recipes. Internal."""
