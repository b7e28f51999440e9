"""Analyses that the tab runs in processes of their own. Internal."""
