"""What lies between the GEMMs of a model: inputs and outputs of norms, logits of routers and of attention. Internal."""
