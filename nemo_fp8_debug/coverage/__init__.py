"""What a model multiplies, and how much of it is looked at: from its modules, and counted in one step. Internal."""
