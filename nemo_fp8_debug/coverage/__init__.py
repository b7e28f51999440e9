"""Report which products a model computes, and how many of them we observe, without running the model. Internal."""
