"""Sequences that a model continues together."""
