"""Rows exchanged at once and in two steps, over emulated nodes."""
