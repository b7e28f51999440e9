"""What the tab reads of the records. Internal."""
