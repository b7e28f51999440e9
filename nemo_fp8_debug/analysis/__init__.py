"""Answers read from run records; nothing here touches a model. Internal."""
