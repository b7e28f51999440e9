"""The tab's page without TensorBoard: served by itself, as a folder, and as a report in one file. Internal."""
