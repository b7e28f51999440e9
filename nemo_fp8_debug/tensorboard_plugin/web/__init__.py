"""Requests and answers of the tab. Internal."""
