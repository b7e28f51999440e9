"""Show the tab's page without TensorBoard: with a server, as a folder, or as a report in one file. Internal."""
