"""Models that train in seconds on a CPU, for tests and for trying releases."""
