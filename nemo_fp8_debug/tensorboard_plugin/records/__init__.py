"""Read records for the tab. Internal."""
