"""Change how a run computes, without changing its code. Unlike the monitor, interventions alter the result. Internal."""
