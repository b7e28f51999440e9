"""Analyses of run records. These modules never use a model. Internal."""
