"""From a training run to something to serve, in six steps (SE-MoE section 3.1)."""
