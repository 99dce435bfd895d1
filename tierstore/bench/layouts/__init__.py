"""The time of a step in many layouts of ranks, measured on emulated devices and limited links, against the plan's."""
