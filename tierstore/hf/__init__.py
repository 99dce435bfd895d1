"""Models of transformers: in from safetensors, trained from the tiers, and out again (extra ``hf``)."""
