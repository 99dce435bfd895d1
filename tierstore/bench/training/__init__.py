"""The same training steps in RAM and tiered, against the bound of bytes and bandwidth."""
