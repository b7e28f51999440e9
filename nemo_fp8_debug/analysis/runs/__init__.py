"""Records as the analysis reads them: metrics, losses and settings of a run. Internal."""
