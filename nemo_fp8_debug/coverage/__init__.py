"""Report the products that a model computes and the share of them that is observed, from its modules alone. Internal."""
