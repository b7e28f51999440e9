"""Changes to the recipes of single layers, and the environment variables that pass these changes to a run. Internal."""
