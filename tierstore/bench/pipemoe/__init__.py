"""PipeMoE measured: whether the chosen number of chunks is the best one, on ranks over limited links."""
