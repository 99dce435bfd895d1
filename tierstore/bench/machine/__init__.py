"""The costs of this machine that ``plan`` predicts with."""
