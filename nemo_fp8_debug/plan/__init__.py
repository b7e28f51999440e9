"""Changes of single layers' recipes, and the environment variables that pass them to a run. Internal."""
