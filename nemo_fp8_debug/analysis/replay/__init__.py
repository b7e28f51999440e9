"""Dumped tensors measured again under other recipes. Internal."""
