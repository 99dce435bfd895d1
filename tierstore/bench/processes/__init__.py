"""Ranks and workers of benchmarks, in processes of their own."""
