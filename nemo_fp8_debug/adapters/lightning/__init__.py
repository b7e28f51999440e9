"""Callbacks for Lightning and NeMo. Internal."""
