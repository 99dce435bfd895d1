"""A tiered model in somebody else's training loop."""
