"""How the costs of one machine's store grow with the number of its records."""
