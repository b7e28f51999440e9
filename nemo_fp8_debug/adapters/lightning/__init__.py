"""Callbacks for Lightning and NeMo."""
