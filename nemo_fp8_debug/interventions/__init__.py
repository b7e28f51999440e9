"""Changes to how a run computes, attached and detached from outside: unlike the monitor, meant to alter the result."""
