"""tierstore: a heterogeneous memory and parameter store for Mixture-of-Experts models."""

__version__ = "0.1.0"
