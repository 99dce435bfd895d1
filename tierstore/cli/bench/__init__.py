"""``tierstore bench``: a file for each larger benchmark, those of several ranks in ``ranks``; the smaller ones in ``group``."""
