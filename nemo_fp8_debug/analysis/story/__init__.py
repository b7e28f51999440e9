"""The diagnosis of a run as plain data, for the tab, the report, the exported page and the terminal. Internal."""
