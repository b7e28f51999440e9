"""What a user asks of a monitor: options, trigger rules, the control file. Internal."""
