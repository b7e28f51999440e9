"""Releases of what the package attaches to, each tried apart from the environment's own."""
