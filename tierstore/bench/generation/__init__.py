"""Generation of text by tierstore and by others, in turns, under one memory limit (docs/BENCH.md)."""
