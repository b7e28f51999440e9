"""Changes of single layers' recipes, and the environment that hands them to a run. Internal."""
