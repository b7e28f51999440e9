"""Read the metrics, losses and settings of a run for the analyses. Internal."""
