"""Recommend recipes for single layers. Internal."""
