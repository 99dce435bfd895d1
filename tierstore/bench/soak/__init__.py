"""A store under load for minutes, killed at random moments, against a model of every byte."""
