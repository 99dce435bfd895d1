"""``tierstore bench``: a file for each larger benchmark's command, the smaller ones in ``group``."""
