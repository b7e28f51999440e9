"""Analyses of run records. No module here touches a model. Internal."""
