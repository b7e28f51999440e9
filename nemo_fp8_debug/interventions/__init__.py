"""Changes to how a run computes, attached from outside: unlike the monitor, meant to alter the result. Internal."""
