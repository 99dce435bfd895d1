"""Makes a served model of a training run, in six stages (SE-MoE section 3.1)."""
