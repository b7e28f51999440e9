"""What tab, report, exported page and terminal tell of a run, as plain data. Internal."""
