"""Which layout of ranks pays for a model: every possible one with its bytes by link, its memory and the time of a step."""
