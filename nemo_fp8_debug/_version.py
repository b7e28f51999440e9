"""The one place that knows the version."""

__version__ = "0.1.0"
"""Version of the package."""
