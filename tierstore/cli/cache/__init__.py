"""``tierstore cache``: the commands, their options, and what they print."""
