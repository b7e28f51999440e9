"""Options of a monitor: configuration, trigger rules, the control file. Internal."""
