"""What is observed of a run, a folder for each: its tables, its observer, its scalars and its rules. Internal."""
