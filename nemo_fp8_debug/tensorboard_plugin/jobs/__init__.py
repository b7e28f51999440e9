"""Run analyses of the tab in separate processes. Internal."""
