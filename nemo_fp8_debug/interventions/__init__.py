"""Change how a run computes, from outside. Unlike the monitor, interventions are meant to alter the result. Internal."""
