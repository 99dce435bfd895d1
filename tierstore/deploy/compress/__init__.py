"""Fewer experts: which belong together, what becomes of their weights, and the model that has them."""
