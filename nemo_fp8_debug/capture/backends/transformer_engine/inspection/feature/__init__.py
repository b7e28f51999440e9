"""The folder that nvdlfw_inspect reads: it runs every file here, this one too. Internal."""
