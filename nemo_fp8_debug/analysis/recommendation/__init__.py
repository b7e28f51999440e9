"""Recommend a recipe for each layer. Internal."""
