"""Observe a run, with one folder for each feature: its tables, its observer, its scalars and its rules. Internal."""
