"""The six stages, a module each."""
